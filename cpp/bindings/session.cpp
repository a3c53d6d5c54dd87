// Session with its sampling parameters: a text that a loaded model continues.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/delete_unlocked.h"
#include "bindings/interpreter.h"
#include "bindings/row_kind.h"
#include "core/error.h"
#include "engine/session.h"

namespace sharpi {

DraftOptions toDraftOptions(const std::string& source, int32_t tokens) {
    DraftOptions options;
    options.tokens = tokens;
    if (source == "ngram") options.source = DraftOptions::Source::NGram;
    else if (source == "mtp") options.source = DraftOptions::Source::Prediction;
    else if (source != "off")
        throw Error(ErrorKind::InvalidArgument, "unknown drafts '" + source + "': known are off, ngram and mtp");
    return options;
}

namespace {

Interrupted interruptCheck() {
    return [] {
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        return false;
    };
}

}  // namespace

void bindSession(py::module_& m) {
    py::class_<SamplingParams>(m, "SamplingParams")
        .def(py::init([](float temperature, int32_t topK, float topP, float minP, float repetition, float presence,
                         float frequency, std::map<int32_t, float> bias, uint64_t seed) {
                 SamplingParams p;
                 p.temperature = temperature;
                 p.topK = topK;
                 p.topP = topP;
                 p.minP = minP;
                 p.repetitionPenalty = repetition;
                 p.presencePenalty = presence;
                 p.frequencyPenalty = frequency;
                 p.logitBias = std::move(bias);
                 p.seed = seed;
                 return p;
             }),
             py::kw_only(), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("min_p"),
             py::arg("repetition_penalty"), py::arg("presence_penalty"), py::arg("frequency_penalty"),
             py::arg("logit_bias"), py::arg("seed"))
        .def("validate", &SamplingParams::validate, py::arg("vocab_size"));

    py::class_<Session, std::unique_ptr<Session, DeleteUnlocked>>(m, "Session")
        .def(py::init<std::shared_ptr<Engine>>(), py::arg("engine").none(false), py::call_guard<ReleasedGil>())
        .def_property_readonly(
            "tokens",
            [](const Session& s) {
                const ReleasedGil release;  // a thread that has locked the session may be waiting for the GIL
                return s.tokens();
            })
        .def_property_readonly("reused_tokens",
                               [](const Session& s) {
                                   const ReleasedGil release;
                                   return s.reusedTokens();
                               })
        .def("reset", &Session::reset, py::call_guard<ReleasedGil>())
        .def(
            "evaluate",
            [](Session& s, const std::vector<int32_t>& tokens, const std::vector<int64_t>& chunks,
               const std::string& kind) {
                const RowKind rows = toRowKind(kind);
                const ReleasedGil release;
                s.evaluate(tokens, rows, nullptr, chunks, interruptCheck());
            },
            py::arg("tokens"), py::arg("chunks") = std::vector<int64_t>{}, py::arg("kind") = "prompt",
            "Appends tokens, computed as rows of this kind: \"prompt\" or \"decode\". chunks: the sizes of the pieces.")
        .def(
            "logits",
            [](Session& s, const std::vector<int32_t>& tokens, const std::vector<int64_t>& chunks,
               const std::string& kind) {
                const RowKind rows = toRowKind(kind);
                {
                    const ReleasedGil release;
                    s.requireRoom(static_cast<int64_t>(tokens.size()));  // before memory is taken for the answer
                }
                py::array_t<float> out(
                    {static_cast<py::ssize_t>(tokens.size()), static_cast<py::ssize_t>(s.vocabSize())});
                float* data = out.mutable_data();
                {
                    const ReleasedGil release;
                    s.evaluate(tokens, rows, data, chunks, interruptCheck());
                }
                return out;
            },
            py::arg("tokens"), py::arg("chunks") = std::vector<int64_t>{}, py::arg("kind") = "prompt",
            "Like evaluate(), and returns the logits: float32 [tokens, vocab], row i follows token i.")
        .def(
            "start",
            [](Session& s, const std::vector<int32_t>& prompt, const SamplingParams& params, const std::string& draft,
               int32_t draftTokens) {
                const DraftOptions drafts = toDraftOptions(draft, draftTokens);
                const ReleasedGil release;
                s.start(prompt, params, interruptCheck(), drafts);
            },
            py::arg("prompt"), py::arg("params"), py::arg("draft") = "off", py::arg("draft_tokens") = 1,
            "draft: where guesses at the next tokens come from: \"off\", \"ngram\" (the text) or \"mtp\" (the model's "
            "prediction layer). The text does not depend on it.")
        .def_property_readonly(
            "draft_counts",
            [](const Session& s) {
                const ReleasedGil release;
                const DraftCounts counts = s.draftCounts();
                return std::tuple(counts.steps, counts.drafted, counts.accepted);
            },
            "Since start(): steps of the model, tokens that were drafted for them, and drafted tokens that were right.")
        .def("next", &Session::next, py::call_guard<ReleasedGil>())
        .def_static(
            "next_of",
            [](const std::vector<py::object>& sessions) {  // which stay alive, whatever becomes of the list
                std::vector<Session*> all;
                for (const py::object& session : sessions) all.push_back(&session.cast<Session&>());
                const ReleasedGil release;
                return Session::nextOf(all);
            },
            py::arg("sessions"),
            "next() of each of these sessions, which share the steps of the model that they need.");
}

}  // namespace sharpi
