// Scheduler with its requests and answers: many texts that a loaded model continues together.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "bindings/bindings.h"
#include "bindings/constraint.h"
#include "bindings/delete_unlocked.h"
#include "bindings/errors.h"
#include "bindings/interpreter.h"
#include "bindings/notice.h"
#include "bindings/row_kind.h"
#include "core/error.h"
#include "engine/scheduler/scheduler.h"

namespace sharpi {

namespace {

py::dict toDict(const RequestFigures& figures) {
    py::dict d;
    d["queued_seconds"] = figures.queuedSeconds;
    d["first_token_seconds"] = figures.firstTokenSeconds;
    d["seconds"] = figures.seconds;
    d["prompt_tokens"] = figures.promptTokens;
    d["reused_tokens"] = figures.reusedTokens;
    d["tokens"] = figures.tokens;
    d["pauses"] = figures.pauses;
    d["prompt_seconds"] = figures.spent.promptSeconds;
    d["generation_seconds"] = figures.spent.stepSeconds;
    d["steps"] = figures.spent.drafts.steps;
    d["drafted_tokens"] = figures.spent.drafts.drafted;
    d["accepted_tokens"] = figures.spent.drafts.accepted;
    return d;
}

py::dict toDict(const SchedulerCounts& counts) {
    py::dict d;
    d["waiting"] = counts.waiting;
    d["preparing"] = counts.preparing;
    d["writing"] = counts.writing;
    d["finished"] = counts.finished;
    d["refused"] = counts.refused;
    d["failure"] = counts.failure;
    d["pauses"] = counts.pauses;
    d["steps"] = counts.steps;
    d["step_tokens"] = counts.stepTokens;
    d["step_seconds"] = counts.stepSeconds;
    d["pieces"] = counts.pieces;
    d["piece_seconds"] = counts.pieceSeconds;
    d["step_host_seconds"] = counts.stepHost.all;
    d["step_hidden_seconds"] = counts.stepHost.hidden;
    d["piece_host_seconds"] = counts.pieceHost.all;
    d["piece_hidden_seconds"] = counts.pieceHost.hidden;
    d["again_tokens"] = counts.lost.tokens + counts.answers.tokens + counts.cuts.tokens;
    d["again_seconds"] = counts.lost.seconds + counts.answers.seconds + counts.cuts.seconds;
    d["lost_tokens"] = counts.lost.tokens;
    d["lost_seconds"] = counts.lost.seconds;
    d["answers_again_tokens"] = counts.answers.tokens;
    d["answers_again_seconds"] = counts.answers.seconds;
    d["cuts_again_tokens"] = counts.cuts.tokens;
    d["cuts_again_seconds"] = counts.cuts.seconds;
    d["adopted_tokens"] = counts.adoptedTokens;
    d["shared_pages"] = counts.sharedPages;
    d["kv_usage"] = counts.cacheUsed;
    d["states_bytes"] = counts.spill.statesBytes;
    d["spill_bytes"] = counts.spill.pagesBytes;
    d["spilled_pages"] = counts.spill.spilledPages;
    d["restored_pages"] = counts.spill.restoredPages;
    d["written_copies"] = counts.spill.writtenCopies;
    d["loaded_copies"] = counts.spill.loadedCopies;
    return d;
}

py::tuple toTuple(const Score& score) {
    py::tuple best(score.best.size());
    for (size_t i = 0; i < score.best.size(); ++i)
        best[i] = py::make_tuple(score.best[i].token, score.best[i].logProbability);
    return py::make_tuple(score.logProbability, best);
}

// The error is an exception, or None.
py::tuple toTuple(const Ending& ending) {
    py::object error = py::none();
    if (ending.finish == Finish::Failed)
        error = ending.kind ? errorOf(*ending.kind, ending.error) : errorOf("SharpiError", ending.error);
    return py::make_tuple(finishName(ending.finish), error, toDict(ending.figures));
}

py::tuple toTuple(const Spent& spent) {
    return py::make_tuple(spent.promptSeconds, spent.stepSeconds, spent.drafts.steps, spent.drafts.drafted,
                          spent.drafts.accepted);
}

py::tuple toTuple(const Answer::News& news) {
    py::list tokens, scores;
    for (const Chosen& chosen : news.tokens) {
        tokens.append(chosen.token);
        scores.append(toTuple(chosen.score));
    }
    py::object promptScores = py::none(), ending = py::none();
    if (news.promptScores) {
        py::list all;
        for (const Score& score : *news.promptScores) all.append(toTuple(score));
        promptScores = std::move(all);
    }
    if (news.ending) ending = toTuple(*news.ending);
    return py::make_tuple(tokens, scores, promptScores, ending);
}

void requireNotNegative(const char* name, int64_t value) {
    if (value < 0) throw Error(ErrorKind::InvalidArgument, std::string(name) + " must not be negative");
}

Answer::News taken(Answer& answer, double seconds) {
    const ReleasedGil released;
    return answer.take(seconds);
}

Answer::News takenOne(Answer& answer, double seconds) {
    const ReleasedGil released;
    return answer.takeOne(seconds);
}

// What every request has.
Request requestOf(std::vector<int32_t> prompt, const SamplingParams& params, const DraftOptions& drafts,
                  std::vector<int32_t> ends, std::optional<int64_t> maxTokens, std::vector<int64_t> marks) {
    Request request;
    request.prompt = std::move(prompt);
    request.marks = std::move(marks);
    request.params = params;
    request.drafts = drafts;
    request.ends = std::move(ends);
    if (maxTokens) request.maxTokens = *maxTokens;
    return request;
}

// Waits for a task, which Ctrl-C cancels.
void waitFor(Task& task) {
    constexpr double kLook = 0.1;  // seconds after which the thread looks whether it was interrupted
    const ReleasedGil released;
    while (!task.wait(kLook)) {
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() == 0) continue;
        const py::error_already_set interrupted;  // takes Python's error, which nothing below may find
        const ReleasedGil again;
        task.cancel();
        try {
            while (!task.wait(kLook)) {
            }
        } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the interruption says more
        }
        throw interrupted;
    }
}

// Appends tokens to a text of their own, piece by piece.
class Evaluation {
public:
    Evaluation(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens, std::vector<int64_t> chunks, RowKind kind,
               float* logits)
        : _engine(std::move(engine)),
          _tokens(std::move(tokens)),
          _chunks(std::move(chunks)),
          _kind(kind),
          _logits(logits) {}

    bool doPiece() {
        if (!_text) {
            auto text = std::make_unique<Continuation>(_engine);
            text->beginEvaluation(_tokens, _kind, _logits);
            _text = std::move(text);  // if it lacked memory, it begins again
        }
        const int64_t rows = _engine->runner().limits().pieces.rows;
        if (_text->evaluatePiece(_chunk < _chunks.size() ? _chunks[_chunk] : rows)) ++_chunk;
        return _text->held().size() == static_cast<int64_t>(_tokens.size());
    }

private:
    const std::shared_ptr<Engine> _engine;
    const std::vector<int32_t> _tokens;
    const std::vector<int64_t> _chunks;
    const RowKind _kind;
    float* const _logits;
    std::unique_ptr<Continuation> _text;
    size_t _chunk = 0;
};

py::array_t<float> logitsOf(Scheduler& scheduler, const std::shared_ptr<Engine>& engine, std::vector<int32_t> tokens,
                            std::vector<int64_t> chunks, const std::string& kind) {
    const SequenceLimits& limits = engine->runner().limits();
    const auto count = static_cast<int64_t>(tokens.size());
    const RowKind rows = toRowKind(kind);
    requireRoomFor(count, limits.context);  // before memory is taken for the answer
    py::array_t<float> out({static_cast<py::ssize_t>(count), static_cast<py::ssize_t>(limits.vocabSize)});
    auto evaluation =
        std::make_shared<Evaluation>(engine, std::move(tokens), std::move(chunks), rows, out.mutable_data());
    waitFor(*scheduler.perform([evaluation = std::move(evaluation)] { return evaluation->doPiece(); }));
    return out;
}

// A conversation as its client has it: it is forgotten when the client lets go of it.
class ClientConversation {
public:
    ClientConversation(std::shared_ptr<Scheduler> scheduler, std::string salt)
        : _scheduler(std::move(scheduler)), _conversation(std::make_shared<Conversation>(std::move(salt))) {}
    ~ClientConversation() {
        try {
            _scheduler->forget(_conversation);
        } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it is closed, or forgets it when it is
        }
    }
    ClientConversation(const ClientConversation&) = delete;
    ClientConversation& operator=(const ClientConversation&) = delete;

    std::vector<int32_t> tokens() const {
        std::vector<int32_t> tokens;
        waitFor(*_scheduler->readTokens(_conversation, tokens));
        return tokens;
    }
    void reset() const { waitFor(*_scheduler->forget(_conversation)); }
    std::shared_ptr<Answer> submit(Request request) const {
        request.conversation = _conversation;
        const ReleasedGil release;
        return _scheduler->submit(std::move(request));
    }

private:
    const std::shared_ptr<Scheduler> _scheduler;
    const std::shared_ptr<Conversation> _conversation;
};

// Threads do not survive a fork: in the child, a scheduler waits for what will never come, so it is left alone.
struct DeleteInItsProcess {
    pid_t process = getpid();
    template <typename T> void operator()(T* object) const {
        if (getpid() == process) DeleteUnlocked()(object);
    }
};

}  // namespace

void bindScheduler(py::module_& m) {
    py::class_<Arrivals, std::shared_ptr<Arrivals>>(m, "Arrivals")
        .def(py::init<>())
        .def("fileno", &Arrivals::descriptor, "Readable while answers have something new.")
        .def("drain", &Arrivals::drain, "The numbers of the answers with something new since the last call.");

    py::class_<Answer, std::shared_ptr<Answer>>(m, "Answer")
        .def_property_readonly("number", &Answer::number)
        .def("cancel", &Answer::cancel)
        .def_property_readonly("computed_tokens", &Answer::computedTokens)
        .def_property_readonly("reused_tokens", &Answer::reusedTokens)
        .def(
            "take", [](Answer& answer, double seconds) { return toTuple(taken(answer, seconds)); }, py::arg("seconds"),
            "What is new since the last call: tokens, a score (log-probability, ((id, log-probability), ...)) for "
            "each, the scores of the prompt's tokens or None, and after the last token (why the answer ended, the "
            "error or None, its figures), else None. Waits up to `seconds` for something new.")
        .def(
            "take_one",
            [](Answer& answer, double seconds) {
                const Answer::News news = takenOne(answer, seconds);
                py::object token = py::none(), spent = py::none(), ending = py::none();
                if (!news.tokens.empty()) {
                    token = py::int_(news.tokens.front().token);
                    if (!news.spent.empty()) spent = toTuple(news.spent.front());
                } else if (news.ending) {
                    ending = toTuple(*news.ending);
                    spent = toTuple(news.ending->figures.spent);
                }
                return py::make_tuple(token, spent, ending);
            },
            py::arg("seconds"),
            "For a reader who stops where it likes: the next token or, after the last one, why the answer ended as "
            "take() has it. Between them what was spent until then: seconds of the prompt's passes and of steps, "
            "steps, drafted and accepted tokens; None for an answer that waits for no reader. All three are None if "
            "nothing came.");

    py::class_<Scheduler, std::shared_ptr<Scheduler>>(m, "Scheduler")
        .def(py::init([](std::shared_ptr<Engine> engine, double greatestGap, int64_t queue, int64_t running,
                         int64_t statesBytes, int64_t spillBytes, std::string cacheDir, int64_t cacheDirBytes,
                         std::string file, const py::object& notice) {
                 requireNotNegative("states_bytes", statesBytes);
                 requireNotNegative("spill_bytes", spillBytes);
                 requireNotNegative("cache_dir_bytes", cacheDirBytes);
                 SchedulerOptions options;
                 options.greatestGap = greatestGap;
                 options.queue = queue;
                 options.running = running;
                 options.statesBytes = static_cast<size_t>(statesBytes);
                 options.spillBytes = static_cast<size_t>(spillBytes);
                 options.directory.path = std::move(cacheDir);
                 options.directory.mostBytes = static_cast<uint64_t>(cacheDirBytes);
                 options.directory.notice = noticeOf(notice);
                 options.file = std::move(file);
                 const ReleasedGil release;
                 return std::shared_ptr<Scheduler>(new Scheduler(std::move(engine), options), DeleteInItsProcess());
             }),
             py::arg("engine").none(false), py::kw_only(), py::arg("max_gap"), py::arg("queue"), py::arg("running"),
             py::arg("states_bytes"), py::arg("spill_bytes"), py::arg("cache_dir"), py::arg("cache_dir_bytes"),
             py::arg("file"), py::arg("notice"))
        .def(
            "submit",
            [](Scheduler& scheduler, std::vector<int32_t> prompt, const SamplingParams& params,
               const std::string& draft, int32_t draftTokens, std::vector<int32_t> ends,
               std::optional<int64_t> maxTokens, int32_t priority, std::string key, std::string salt,
               std::optional<double> seconds, std::shared_ptr<Arrivals> arrivals, int32_t best, bool echo,
               const py::object& constraint, std::vector<int64_t> marks) {
                Request request = requestOf(std::move(prompt), params, toDraftOptions(draft, draftTokens),
                                            std::move(ends), maxTokens, std::move(marks));
                request.priority = priority;
                request.key = std::move(key);
                request.salt = std::move(salt);
                request.seconds = seconds;
                request.extras = {best, echo, constraintOf(constraint)};
                const ReleasedGil release;
                return scheduler.submit(std::move(request), std::move(arrivals));
            },
            py::arg("prompt"), py::arg("params"), py::kw_only(), py::arg("draft"), py::arg("draft_tokens"),
            py::arg("ends"), py::arg("max_tokens"), py::arg("priority"), py::arg("key"), py::arg("salt"),
            py::arg("seconds"), py::arg("arrivals"), py::arg("best"), py::arg("echo"), py::arg("constraint"),
            py::arg("marks"))
        .def("logits", &logitsOf, py::arg("engine").none(false), py::arg("tokens"), py::arg("chunks"), py::arg("kind"),
             "float32 [tokens, vocab]: row i follows token i. chunks: the sizes of the pieces. kind: \"prompt\" or "
             "\"decode\" rows.")
        .def("close", &Scheduler::close, py::call_guard<ReleasedGil>())
        .def("counts", [](const Scheduler& scheduler) { return toDict(scheduler.counts()); });

    py::class_<ClientConversation, std::unique_ptr<ClientConversation, DeleteInItsProcess>>(m, "Conversation")
        .def(py::init([](std::shared_ptr<Scheduler> scheduler, std::string salt) {
                 return std::unique_ptr<ClientConversation, DeleteInItsProcess>(
                     new ClientConversation(std::move(scheduler), std::move(salt)));
             }),
             py::arg("scheduler").none(false), py::arg("salt"))
        .def_property_readonly("tokens", &ClientConversation::tokens, "Those that were evaluated and read, in order.")
        .def("reset", &ClientConversation::reset, "Forgets them, and cancels the request.")
        .def(
            "submit",
            [](const ClientConversation& conversation, std::vector<int32_t> prompt, const SamplingParams& params,
               const std::string& draft, int32_t draftTokens, std::vector<int32_t> ends,
               std::optional<int64_t> maxTokens, std::vector<int64_t> marks, int64_t ahead) {
                Request request = requestOf(std::move(prompt), params, toDraftOptions(draft, draftTokens),
                                            std::move(ends), maxTokens, std::move(marks));
                request.ahead = ahead;
                return conversation.submit(std::move(request));
            },
            py::arg("prompt"), py::arg("params"), py::kw_only(), py::arg("draft"), py::arg("draft_tokens"),
            py::arg("ends"), py::arg("max_tokens"), py::arg("marks"), py::arg("ahead"),
            "Continues `prompt`, which is the whole text so far, and cancels the request before it. No step begins "
            "while "
            "`ahead` tokens are unread.");
}

}  // namespace sharpi
