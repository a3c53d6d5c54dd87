// See host_rows_sharer.h.
#include "backend/host_rows_sharer.h"

#include "kernels/rows/crossing.h"

namespace sharpi {

void HostRowsSharer::sendInput(const cuda::RowOutputs& x, int64_t rows, int64_t cols) {
    const Mailbox& mail = _pass.share->mailbox();
    _inputSent = _pass.work->nextSent();
    _hiddenSent = 0;
    cuda::sendRows(_pass.stream, x, rows, 0, cols, mail.input, mail.sent, _inputSent);
}

void HostRowsSharer::sendHidden(const cuda::RowOutputs& hidden, int64_t rows, int64_t end) {
    const Mailbox& mail = _pass.share->mailbox();
    _hiddenSent = _pass.work->nextSent();
    cuda::sendRows(_pass.stream, hidden, rows, 0, end, mail.hidden, mail.sent, _hiddenSent);
}

void HostRowsSharer::gated(const GatedProduct& p, const Weight& reader, int64_t rows, int64_t begin) {
    _gatedReturned = _pass.work->nextReturned();
    const HostGated layer{p.gate.inFile(), p.up.inFile(), p.hostBiases.gate, p.hostBiases.up, p.activation};
    _pass.work->add([=, share = _pass.share, reader = reader.inFile(), sent = _inputSent, returned = _gatedReturned] {
        share->gated(layer, reader, rows, begin, sent, returned);
    });
}

void HostRowsSharer::receiveHidden(const cuda::RowOutputs& hidden, int64_t rows, int64_t begin, int64_t end) {
    const Mailbox& mail = _pass.share->mailbox();
    cuda::receiveRows(_pass.stream, mail.hidden, rows, begin, end, mail.returned, _gatedReturned, hidden);
}

void HostRowsSharer::product(const Weight& w, const float* bias, int64_t rows, int64_t begin, float* to, bool adds) {
    const Mailbox& mail = _pass.share->mailbox();
    const uint32_t returned = _pass.work->nextReturned();
    _pass.work->add([=, share = _pass.share, w = w.inFile(), after = _hiddenSent] {
        share->down(w, rows, begin, after, returned);
    });
    cuda::receiveProduct(_pass.stream, mail.down, rows, begin, w.rows - begin, mail.returned, returned, to, w.rows,
                         bias, adds);
}

void HostRowsSharer::head(const Weight& output, int64_t rows, int64_t begin, float* logits) {
    const Mailbox& mail = _pass.share->mailbox();
    const uint32_t returned = _pass.work->nextReturned();
    _pass.work->add([=, share = _pass.share, output = output.inFile(), sent = _inputSent] {
        share->head(output, rows, begin, sent, returned);
    });
    cuda::receiveRows(_pass.stream, mail.logits, rows, begin, output.rows, mail.returned, returned, {logits, {}, {}});
}

}  // namespace sharpi
