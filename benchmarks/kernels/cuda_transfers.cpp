// Measures how fast weights come across PCIe: pieces of about 16 MiB of a mapped file of 1 GiB, copied alone, or copied
// and packed, and each of these also used by a product. Passes are launched and replayed. It prints GB/s of the file.
//
// The file is made in $TMPDIR (or /tmp) and removed. Few slots show whether the copies wait for what uses them.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "device/cuda_memory.h"
#include "kernels/formats/packed.h"
#include "kernels/matvec/matvec.h"
#include "memory/allocator.h"
#include "model/weights.h"
#include "transfers/cuda_transfers.h"

using namespace sharpi;
using namespace sharpi::cuda;

namespace {

constexpr size_t kFileBytes = size_t{1} << 30;
constexpr int64_t kCols = 4096;

// Filled with a byte that makes every scale small and finite.
class TemporaryFile {
public:
    TemporaryFile() {
        const char* folder = std::getenv("TMPDIR");
        _path = std::string(folder && *folder ? folder : "/tmp") + "/sharpi_transfers_XXXXXX";
        const int fd = ::mkstemp(_path.data());
        if (fd < 0) throw std::runtime_error(_path + " cannot be made");
        const std::vector<uint8_t> bytes(size_t{16} << 20, 0x21);
        size_t written = 0;
        while (written < kFileBytes) {
            const ssize_t count = ::write(fd, bytes.data(), std::min(bytes.size(), kFileBytes - written));
            if (count <= 0) break;
            written += static_cast<size_t>(count);
        }
        ::close(fd);
        if (written == kFileBytes) _mapped.emplace(_path);
        ::unlink(_path.c_str());
        if (!_mapped) throw std::runtime_error("no room for a file of 1 GiB: set TMPDIR");
    }
    const uint8_t* data() const { return _mapped->data(); }

private:
    std::string _path;
    std::optional<MappedFile> _mapped;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Setting {
    DType type;
    int slots;
    bool use;
    size_t pieceBytes = WeightGroup::kPieceBytes;
};

class Benchmark {
public:
    Benchmark()
        : _stream(findDevice(0)),
          _memory(_stream),
          _allocator(_memory),
          _transfers(std::make_unique<CudaTransfers>(_stream)) {
        // A piece of floats is no larger in its slot than in the file; packed ones are hardly so.
        const size_t room = WeightGroup::kPieceBytes + (size_t{1} << 20);
        _slotBytes = room;
        _slots = Buffer(_allocator, room * Transfers::kMostBuffers, "slots");
        _staging = Buffer(_allocator, room * kTransferStages, "staging");
        const double begin = now();
        _transfers->prepare({{{_file.data(), kFileBytes}}, {}, {}}, _staging.as<void>(), room);
        std::printf("%s; 1 GiB pinned in %.3f s\n", _stream.device().name.c_str(), now() - begin);
        for (const std::string& note : _transfers->notes()) std::printf("%s\n", note.c_str());
        _forms = Buffer(_allocator, quantizedRowsBytes(1, kCols), "a row");
        _floats = Buffer(_allocator, sizeof(float) * kCols, "a row");
        _y = Buffer(_allocator, sizeof(float) * (size_t{1} << 20), "products");
        _input.floats = _floats.as<float>();
        _input.quantized = quantizedRowsOver(_forms.as<void>(), 1, kCols);
        _stream.synchronize();
    }
    ~Benchmark() { _transfers.reset(); }

    void run() {
        std::printf("\n%-6s %5s %6s  %-22s %9s %9s\n", "type", "slots", "MiB", "GB/s of", "launched", "replayed");
        constexpr int kAll = Transfers::kMostBuffers;
        measure("copies alone", {DType::F32, kAll, false});
        for (const DType type : {DType::Q4_K, DType::Q6_K}) {
            measure("copies, packing", {type, kAll, false});
            for (const int slots : {kAll, 4, 2}) measure("copies, packing, use", {type, slots, true});
        }
        for (const size_t mib : {2, 4, 8}) measure("copies, packing, use", {DType::Q4_K, kAll, true, mib << 20});
    }

private:
    // Fetches the whole file once.
    void pass(const Setting& setting) {
        const size_t row = rowBytes(setting.type, kCols);
        const auto rows = static_cast<int64_t>(setting.pieceBytes / row) / 32 * 32;
        const size_t piece = row * static_cast<size_t>(rows), count = kFileBytes / piece;
        _passBytes = piece * count;
        const auto slotOf = [&](size_t i) { return static_cast<int>(i % static_cast<size_t>(setting.slots)); };
        const auto weights = [&](size_t i) {
            return Matrix{setting.type, rows, kCols,
                          _slots.as<uint8_t>() + static_cast<size_t>(slotOf(i)) * _slotBytes};
        };
        const auto fetch = [&](size_t i) {
            if (i < count) _transfers->fetch({{weights(i), 0, rows, _file.data() + i * piece}}, slotOf(i));
        };
        _transfers->begin();
        for (int i = 0; i < setting.slots; ++i) fetch(static_cast<size_t>(i));
        for (size_t i = 0; i < count; ++i) {
            _transfers->await(slotOf(i));
            if (setting.use) matvec(_stream, _input, 1, {{weights(i), nullptr, _y.as<float>()}});
            _transfers->release(slotOf(i));
            fetch(i + static_cast<size_t>(setting.slots));
        }
        _transfers->end();
    }

    // The best of three, because others may use the bus.
    double rate(const std::function<void()>& body) {
        double best = 0;
        for (int i = 0; i < 3; ++i) {
            _stream.synchronize();
            const double begin = now();
            body();
            _stream.synchronize();
            best = std::max(best, static_cast<double>(_passBytes) / (now() - begin));
        }
        return best / 1e9;
    }

    void measure(const char* name, const Setting& setting) {
        pass(setting);
        const double launched = rate([&] { pass(setting); });
        const std::unique_ptr<Graph> graph = _stream.capture([&] { pass(setting); });
        _stream.replay(*graph);
        const double replayed = rate([&] { _stream.replay(*graph); });
        std::printf("%-6s %5d %6zu  %-22s %9.1f %9.1f\n", info(setting.type).name, setting.slots,
                    setting.pieceBytes >> 20, name, launched, replayed);
        std::fflush(stdout);
    }

    TemporaryFile _file;
    Stream _stream;
    CudaMemory _memory;
    Allocator _allocator;
    std::unique_ptr<CudaTransfers> _transfers;
    Buffer _slots, _staging, _forms, _floats, _y;
    size_t _slotBytes = 0, _passBytes = 0;
    MatvecInput _input;
};

}  // namespace

int main() {
    try {
        Benchmark().run();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
