// Scheduler with its requests and answers: many texts that a loaded model continues together.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/constraint.h"
#include "bindings/delete_unlocked.h"
#include "bindings/notice.h"
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
    d["steps"] = figures.drafts.steps;
    d["drafted_tokens"] = figures.drafts.drafted;
    d["accepted_tokens"] = figures.drafts.accepted;
    return d;
}

py::dict toDict(const SchedulerCounts& counts) {
    py::dict d;
    d["waiting"] = counts.waiting;
    d["preparing"] = counts.preparing;
    d["writing"] = counts.writing;
    d["finished"] = counts.finished;
    d["refused"] = counts.refused;
    d["pauses"] = counts.pauses;
    d["steps"] = counts.steps;
    d["step_tokens"] = counts.stepTokens;
    d["step_seconds"] = counts.stepSeconds;
    d["pieces"] = counts.pieces;
    d["piece_seconds"] = counts.pieceSeconds;
    d["again_seconds"] = counts.againSeconds;
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
    if (news.ending)
        ending = py::make_tuple(finishName(news.ending->finish), news.ending->error, toDict(news.ending->figures));
    return py::make_tuple(tokens, scores, promptScores, ending);
}

void requireNotNegative(const char* name, int64_t value) {
    if (value < 0) throw Error(ErrorKind::InvalidArgument, std::string(name) + " must not be negative");
}

Answer::News taken(Answer& answer, double seconds) {
    py::gil_scoped_release release;
    return answer.take(seconds);
}

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
            "error, its figures), else None. Waits up to `seconds` for something new.");

    py::class_<Scheduler, std::unique_ptr<Scheduler, DeleteUnlocked>>(m, "Scheduler")
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
                 py::gil_scoped_release release;
                 return std::unique_ptr<Scheduler, DeleteUnlocked>(new Scheduler(std::move(engine), options));
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
               const py::object& constraint) {
                Request request;
                request.prompt = std::move(prompt);
                request.params = params;
                request.drafts = toDraftOptions(draft, draftTokens);
                request.ends = std::move(ends);
                if (maxTokens) request.maxTokens = *maxTokens;
                request.priority = priority;
                request.key = std::move(key);
                request.salt = std::move(salt);
                request.seconds = seconds;
                request.extras = {best, echo, constraintOf(constraint)};
                py::gil_scoped_release release;
                return scheduler.submit(std::move(request), std::move(arrivals));
            },
            py::arg("prompt"), py::arg("params"), py::kw_only(), py::arg("draft"), py::arg("draft_tokens"),
            py::arg("ends"), py::arg("max_tokens"), py::arg("priority"), py::arg("key"), py::arg("salt"),
            py::arg("seconds"), py::arg("arrivals"), py::arg("best"), py::arg("echo"), py::arg("constraint"))
        .def("counts", [](const Scheduler& scheduler) { return toDict(scheduler.counts()); });
}

}  // namespace sharpi
