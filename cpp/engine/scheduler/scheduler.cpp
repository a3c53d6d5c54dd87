// See scheduler.h.
#include "engine/scheduler/scheduler.h"

#include <algorithm>
#include <limits>
#include <new>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/rules/log_softmax.h"
#include "engine/scheduler/bits_identity.h"
#include "engine/texts/shared_steps.h"
#include "memory/kv_sharing.h"

namespace sharpi {

namespace {

// How long the thread waits before it looks again if memory is held by texts that are not its own.
constexpr auto kPatience = std::chrono::milliseconds(5);
// A step has at most this many rows if answers draft: more rows cost more than right guesses gain.
constexpr int64_t kDraftRows = 16;
// A request that is admitted beside others leaves a page for their answers to grow, and twice as many each time that it
// had to give way, up to this many times.
constexpr int64_t kMostSpareDoublings = 6;

// If memory ends in the thread's own work and not in a request's pass, the thread tries again, so many times in a row.
constexpr int kMostTries = 20;

// Whether layers have states or windows. Then shared pages do not hold all of a text.
bool isLimited(const KvCache& kv) { return kv.states().any() || kv.lists() > 1; }

// Whether another text of this length finds room for what its next token sees in layers that do not see everything.
// If it does not, it can adopt nothing from others.
bool hasWindowRoom(const KvCache& kv, int64_t tokens) {
    for (int32_t list = 1; list < kv.lists(); ++list) {
        const AttentionReach& reach = kv.pool(list).reach();
        const int64_t seen = std::max(reach.window, reach.chunk) + PagePool::kPageTokens;
        if (kv.pool(list).room(false) < PagePool::pagesFor(std::min(tokens, seen))) return false;
    }
    return true;
}

// Requests that hold memory at a time. A model with states, or with windows, has room for so many sequences only.
int64_t mostRunning(Engine& engine, const SchedulerOptions& options) {
    if (options.running > 0) return options.running;
    const LockedModel model = engine.runner().lock();
    return isLimited(model.kv()) ? engine.options().sequences : engine.runner().limits().headRows;
}

double since(SchedulerClock::time_point from) {
    return std::chrono::duration<double>(SchedulerClock::now() - from).count();
}

uint64_t openStore(Engine& engine, const SchedulerOptions& options) {
    const LockedModel model = engine.runner().lock();
    SpillOptions spill{options.spillBytes, options.statesBytes, options.directory};
    spill.directory.identity = bitsIdentity(options.file, engine, model);
    return KvSharing(model.kv()).openStore(spill);
}

constexpr const char* kClosed = "the scheduler is closed";

// Never throws.
std::exception_ptr closedError() {
    try {
        throw Error(ErrorKind::InvalidArgument, kClosed);
    } catch (...) {
        return std::current_exception();
    }
}

}  // namespace

Scheduler::Scheduler(std::shared_ptr<Engine> engine, const SchedulerOptions& options)
    : _engine(std::move(engine)),
      _options(options),
      _mostRunning(mostRunning(*_engine, options)),
      _keepsTexts(isLimited(_engine->runner().lock().kv())),
      _pace(options.greatestGap, _engine->runner().limits().pieces.rows, _engine->backend().bus().streams),
      _clock(_engine->backend()) {
    if (!(options.greatestGap > 0)) throw Error(ErrorKind::InvalidArgument, "the greatest gap must be above 0 seconds");
    if (options.queue < 1 || options.running < 0)
        throw Error(ErrorKind::InvalidArgument, "a scheduler needs room for at least one request");
    _store = openStore(*_engine, _options);
    _thread = std::thread([this] { work(); });
}

Scheduler::~Scheduler() { close(); }

void Scheduler::close() {
    {
        std::lock_guard<std::mutex> lock(_bell->mutex);
        _isEnding = true;
    }
    _bell->rung.notify_all();
    const std::lock_guard<std::mutex> lock(_closing);
    if (_thread.joinable()) _thread.join();
}

std::shared_ptr<Answer> Scheduler::submit(Request request, std::shared_ptr<Arrivals> arrivals) {
    requireServable(request, _engine->runner().limits());
    auto entry = std::make_unique<Entry>();
    entry->submitted = Clock::now();
    std::sort(request.ends.begin(), request.ends.end());
    entry->figures.promptTokens = static_cast<int64_t>(request.prompt.size());
    if (request.conversation) request.salt = request.conversation->salt();
    entry->request = std::move(request);
    std::lock_guard<std::mutex> lock(_bell->mutex);
    if (_isEnding) throw Error(ErrorKind::InvalidArgument, kClosed);
    if (!_counts.failure.empty()) throw Error(ErrorKind::DeviceLost, _counts.failure);
    const int64_t waiting = _counts.waiting + static_cast<int64_t>(_submitted.size());
    if (waiting >= _options.queue) {
        ++_counts.refused;
        throw Error(ErrorKind::Busy, std::to_string(waiting) + " requests are waiting, and the queue has room for " +
                                         std::to_string(_options.queue) + ": try again later");
    }
    entry->answer = std::make_shared<Answer>(_numbers++, std::move(arrivals), entry->request.ahead, _bell);
    std::shared_ptr<Answer> answer = entry->answer;
    _submitted.push_back(std::move(entry));
    _bell->rung.notify_all();
    return answer;
}

std::shared_ptr<Task> Scheduler::perform(std::function<bool()> piece, Task::Length length) {
    auto task = std::make_shared<Task>(std::move(piece), length);
    std::lock_guard<std::mutex> lock(_bell->mutex);
    if (_isEnding) throw Error(ErrorKind::InvalidArgument, kClosed);
    _submittedTasks.push_back(task);
    _bell->rung.notify_all();
    return task;
}

std::shared_ptr<Task> Scheduler::readTokens(std::shared_ptr<const Conversation> conversation,
                                            std::vector<int32_t>& tokens) {
    const auto read = [this, conversation = std::move(conversation), &tokens] {
        const Continuation* text = conversation->kept();
        for (const auto& entry : _entries)
            if (entry->request.conversation == conversation && entry->text) text = entry->text.get();
        tokens = conversation->tokens(text);
        return true;
    };
    return perform(read, Task::Length::Short);
}

std::shared_ptr<Task> Scheduler::forget(std::shared_ptr<Conversation> conversation) {
    const auto forgetIt = [this, conversation = std::move(conversation)] {
        for (const auto& entry : _entries)
            if (entry->request.conversation == conversation) finish(*entry, {Finish::Cancelled});
        removeFinished();
        _kept.remove(*conversation);
        noteShared();
        return true;
    };
    return perform(forgetIt, Task::Length::Short);
}

SchedulerCounts Scheduler::counts() const {
    std::lock_guard<std::mutex> lock(_bell->mutex);
    SchedulerCounts counts = _counts;
    counts.waiting += static_cast<int64_t>(_submitted.size());
    return counts;
}

void Scheduler::noteShared() {
    const auto [pages, free, all, spill] = [&] {
        const LockedModel model = _engine->runner().lock();
        const KvSharing sharing(model.kv());
        const PagePool& pool = model.kv().pool(0);
        return std::tuple(sharing.pages(), pool.freePages(), pool.pages().count(), sharing.storeCounts());
    }();
    std::lock_guard<std::mutex> lock(_bell->mutex);
    _counts.sharedPages = pages;
    _counts.cacheUsed = 1.0 - static_cast<double>(free) / static_cast<double>(std::max<int64_t>(all, 1));
    _counts.spill = spill;
}

template <typename Change> void Scheduler::note(const Change& change) {
    std::lock_guard<std::mutex> lock(_bell->mutex);
    change(_counts);
}

// --- the thread ------------------------------------------------------------------------------------------------------

// What fails in a request's own pass ends requests where it fails. What fails between, in the thread's bookkeeping,
// leaves it as it was, and the turn is repeated.
void Scheduler::work() {
    for (int tries = 0;;) {
        try {
            if (!collect()) break;
            takeTurn();
            tries = 0;
        } catch (const std::exception& error) {
            if (!isOutOfMemory(error) || ++tries == kMostTries) {
                for (const auto& entry : _entries) finish(*entry, failed(error));
                tries = 0;
            }
            std::this_thread::sleep_for(kPatience);
        }
    }
    for (const auto& entry : _entries) finish(*entry, {Finish::Cancelled});
    _entries.clear();
    _kept.clear();
    _past.clear();
    _tasks.endAll(closedError());  // nobody adds any more
    KvSharing(_engine->runner().lock().kv()).forget(_store);
}

void Scheduler::takeTurn() {
    endOverdue();
    noteReaders(_entries);
    HostSeconds host = _clock.lap(), ofPiece;
    // For a task any number of requests may be paused.
    bool worked = _tasks.doPieces([&](const std::exception& error) {
        failed(error);
        return isOutOfMemory(error) && makeRoom(1);
    });
    _clock.lap();
    const bool writes = countOf(_entries, State::Writing) > 0;
    bool prepares = false;
    if (!writes || !_pace.answersAreDue()) {
        const int64_t rows = _pace.pieceRows(writes);
        const std::vector<Entry*> group = prompts(rows);
        if (!group.empty()) prepare(group, rows);
        prepares = !group.empty();
        ofPiece = _clock.lap();
    }
    const bool wrote = write();
    worked = worked || prepares || wrote;
    // A lost device ends also those that had no part in the pass that failed.
    if (!_counts.failure.empty())
        for (const auto& entry : _entries) finish(*entry, {Finish::Failed, _counts.failure, ErrorKind::DeviceLost});
    removeFinished();
    noteReaders(_entries);
    host += _clock.lap();
    note([&](SchedulerCounts& counts) {
        if (prepares) counts.pieceHost += ofPiece;
        if (wrote) counts.stepHost += host;
    });
    const bool waits = std::any_of(_entries.begin(), _entries.end(), [](const auto& e) { return isWanted(*e); });
    if (!worked && waits) std::this_thread::sleep_for(kPatience);
}

// Takes what was submitted; waits for it if there is nothing else to do. Returns whether there is work. Tasks are taken
// with requests, so that one that was submitted after a request finds it.
bool Scheduler::collect() {
    std::unique_lock<std::mutex> lock(_bell->mutex);
    const auto hasWork = [&] {
        return _isEnding || !_submitted.empty() || !_submittedTasks.empty() || !_tasks.isEmpty() ||
               std::any_of(_entries.begin(), _entries.end(), [](const auto& entry) { return needsALook(*entry); });
    };
    auto until = Clock::time_point::max();
    for (const auto& entry : _entries) {
        if (!entry->request.seconds) continue;
        const std::chrono::duration<double> allowed(std::min(*entry->request.seconds, 1e9));
        until = std::min(until, entry->submitted + std::chrono::duration_cast<Clock::duration>(allowed));
    }
    if (until == Clock::time_point::max()) _bell->rung.wait(lock, hasWork);
    else _bell->rung.wait_until(lock, until, hasWork);
    _clock.lap();
    _entries.reserve(_entries.size() + _submitted.size());
    _kept.reserve(_submitted.size());
    _tasks.take(_submittedTasks);
    for (auto& entry : _submitted) {
        if (const auto& conversation = entry->request.conversation) {
            conversation->setLatest(entry->answer->number());
            _kept.add(conversation);
        }
        _entries.push_back(std::move(entry));
    }
    _submitted.clear();
    _counts.countStates(_entries);
    return !_isEnding;
}

void Scheduler::endOverdue() {
    for (const auto& entry : _entries) {
        if (entry->answer->isCancelled() || isOutdated(*entry)) finish(*entry, {Finish::Cancelled});
        else if (entry->request.seconds && since(entry->submitted) > *entry->request.seconds)
            finish(*entry, {Finish::TimeOut});
    }
    removeFinished();
}

// Of the requests whose prompt is not computed: the one with the highest priority; of these, one whose client has the
// fewest requests served; of these, the one that is soonest done. A request counts as shorter the longer it has waited,
// so that short ones cannot keep it waiting forever. taken: entries that do not count. promised: see admit().
Scheduler::Entry* Scheduler::nextToPrepare(const std::vector<Entry*>& taken, const Promised& promised) {
    const auto served = [&](const std::string& key) {
        return std::count_if(_entries.begin(), _entries.end(), [&](const auto& entry) {
            return isWanted(*entry) && entry->state != State::Waiting && entry->request.key == key;
        });
    };
    const auto rank = [&](const Entry& entry) {
        const auto missing = static_cast<int64_t>(entry.request.prompt.size()) - entry.figures.reusedTokens;
        const bool begun = entry.state == State::Preparing;
        return std::tuple(-entry.request.priority, begun ? 0 : served(entry.request.key),
                          _pace.promptSeconds(missing) - since(entry.submitted));
    };
    const auto bestOf = [&](const auto& counts) {
        Entry* best = nullptr;
        for (const auto& entry : _entries) {
            if (!counts(*entry) || std::find(taken.begin(), taken.end(), entry.get()) != taken.end()) continue;
            if (!best || rank(*entry) < rank(*best)) best = entry.get();
        }
        return best;
    };
    const auto mayBegin = [](const Entry& entry) {
        const auto& conversation = entry.request.conversation;
        return entry.text || !conversation || !conversation->isBusy();
    };
    Entry* best =
        bestOf([&](const Entry& entry) { return isWanted(entry) && entry.state != State::Writing && mayBegin(entry); });
    if (!best || best->state != State::Waiting || admit(*best, promised)) return best;
    return bestOf([](const Entry& entry) { return isWanted(entry) && entry.state == State::Preparing; });
}

// Lets a request take memory, if there is enough beside that of the others. Of the texts that nobody uses, that
// which holds most of its prompt becomes the request's, and others give way.
bool Scheduler::admit(Entry& entry, const Promised& promised) {
    const int64_t running = runningOf(_entries);
    if (running >= _mostRunning || (_tasks.isUnderWay() && entry.figures.pauses > 0)) return false;
    const Request& request = entry.request;
    const auto& conversation = request.conversation;
    const bool echo = request.extras.echo;  // computes its whole prompt
    const Continuation* own = entry.text.get();
    if (!own && conversation) own = conversation->kept();
    const Continuation* const match = own || echo ? nullptr : _kept.match(request.salt, request.prompt);
    if (!own) own = match;
    const auto size = static_cast<int64_t>(request.prompt.size());
    const int64_t tokens = std::max(entry.text ? static_cast<int64_t>(own->tokens().size()) : 0, size);
    const int64_t spare = int64_t{1} << std::min<int64_t>(entry.figures.pauses, kMostSpareDoublings);
    const int64_t wanted = PagePool::pagesFor(tokens + 1) + (running > 0 ? spare : 0) + promised.pages;
    const auto fits = [&] {
        const int64_t held = own ? own->held().cachedTokens() / PagePool::kPageTokens : 0;
        const LockedModel model = _engine->runner().lock();
        const int64_t shared = echo ? 0 : KvSharing(model.kv()).pagesInUse({request.salt, request.prompt.data(), size});
        return model.kv().freePages() + held + shared >= wanted;
    };
    const auto fitsLimits = [&] {
        const LockedModel model = _engine->runner().lock();
        return (own || hasWindowRoom(model.kv(), size)) && model.kv().states().stepRoom() > promised.states;
    };
    while (!(fits() && fitsLimits()) && makeRoom(std::numeric_limits<int64_t>::max(), own)) {
    }
    if (running > 0 && !fits()) return false;
    if (!entry.text) {
        std::unique_ptr<Continuation> text = match ? _kept.take(match) : nullptr;
        if (conversation && conversation->kept()) text = conversation->lend();
        if (!text) text = std::make_unique<Continuation>(_engine, request.salt);
        if (conversation) conversation->setBusy();
        entry.text = std::move(text);
    }
    if (!entry.hasBegun) entry.figures.queuedSeconds = since(entry.submitted);
    entry.state = State::Preparing;
    return true;
}

// The request whose turn it is, and others whose prompts may share a pass of so many rows with it.
std::vector<Scheduler::Entry*> Scheduler::prompts(int64_t rows) {
    std::vector<Entry*> group, others;
    const auto most = static_cast<size_t>(_engine->runner().limits().pieces.prompts);
    Promised promised;
    int64_t missing = 0;
    while (group.size() < most && missing < rows) {
        std::vector<Entry*> taken = group;
        taken.insert(taken.end(), others.begin(), others.end());
        Entry* entry = nextToPrepare(taken, promised);
        if (!entry) break;
        if (!begin(*entry)) continue;
        // If its next page has the tokens of one that another is about to compute, it waits for that one.
        const int64_t held = entry->text->held().cachedTokens(), page = PagePool::kPageTokens;
        const bool waits = std::any_of(group.begin(), group.end(), [&](const Entry* other) {
            return commonTokens(entry->request, other->request) >= held / page * page + page;
        });
        if (waits) {
            others.push_back(entry);
            continue;
        }
        const auto tokens = static_cast<int64_t>(entry->request.prompt.size());
        const int64_t lacks = std::max<int64_t>(tokens - held, 1);
        missing += lacks;
        promised.pages += PagePool::pagesFor(lacks);
        ++promised.states;
        group.push_back(entry);
        // A state from which many texts may continue is worth more than a text that one may.
        while (entry->text->held().lacksStates() && _kept.dropEnded()) {
        }
    }
    return group;
}

// Gives the text its prompt, and what others have computed of it. Returns whether it has it now: otherwise the request
// has ended.
bool Scheduler::begin(Entry& entry) {
    Continuation& text = *entry.text;
    try {
        if (!entry.hasBegun)
            text.begin(entry.request.prompt, entry.request.params, entry.request.drafts, entry.request.extras,
                       entry.request.marks);
        if (!entry.hasBegun && entry.request.conversation)
            entry.request.conversation->follow(entry.answer, entry.figures.promptTokens);
        entry.hasBegun = true;
        const int64_t before = text.held().adoptedTokens();
        text.adoptPrompt();
        note([&](SchedulerCounts& counts) { counts.adoptedTokens += text.held().adoptedTokens() - before; });
    } catch (const std::exception& error) {
        if (entry.hasBegun && isOutOfMemory(error)) return true;  // it is computed instead
        finish(entry, failed(error));
        return false;
    }
    return true;
}

// Computes a piece of what these requests lack, in one pass. If there is no room for all of them, the first goes alone.
void Scheduler::prepare(const std::vector<Entry*>& group, int64_t rows) {
    std::vector<Continuation*> texts;
    for (Entry* entry : group) {
        texts.push_back(entry->text.get());
        if (entry->earlier) continue;
        entry->earlier = entry->request.extras.echo ? EarlierText() : _past.earlier(*entry, _entries);
    }
    try {
        const std::vector<EvaluatedRows> before = evaluatedBy(texts);
        const Clock::time_point started = Clock::now();
        const std::vector<bool> isDone = prepareTogether(texts, rows);
        const double seconds = since(started);
        const int64_t restored = _counts.spill.restoredPages;
        noteShared();
        // What bringing pages back takes says nothing about computing them.
        AgainRows evaluated;
        for (size_t i = 0; i < group.size(); ++i) evaluated.add(*texts[i], before[i], *group[i]->earlier);
        _pace.countPiece(_counts.spill.restoredPages == restored ? evaluated.all : 0, seconds);
        note([&](SchedulerCounts& counts) {
            ++counts.pieces;
            counts.pieceSeconds += seconds;
            counts.countAgain(evaluated, seconds);
        });
        for (size_t i = 0; i < group.size(); ++i) {
            Entry& entry = *group[i];
            entry.figures.reusedTokens = entry.text->reusedTokens();
            const int64_t prompt = entry.figures.promptTokens;
            entry.answer->setProgress(std::min(entry.text->held().size(), prompt), entry.figures.reusedTokens);
            Spent& spent = entry.figures.spent;
            (entry.hasPrompt ? spent.stepSeconds : spent.promptSeconds) += seconds;
            if (!isDone[i]) continue;
            if (!entry.hasPrompt && entry.text->promptScores()) entry.answer->add(*entry.text->promptScores());
            entry.hasPrompt = true;
            entry.state = State::Writing;
            if (entry.request.maxTokens == 0) finish(entry, {Finish::Length});
        }
    } catch (const std::exception& error) {
        if (isOutOfMemory(error) && group.size() > 1) return prepare({group.front()}, rows);
        if (isOutOfMemory(error) && (makeRoom() || _tasks.isUnderWay())) return;
        for (Entry* entry : group) finish(*entry, failed(error));
    }
}

// A step for all answers that are being written. Returns whether there are any.
bool Scheduler::write() {
    std::vector<Entry*> writing;
    std::vector<Continuation*> texts;
    std::vector<bool> steps;  // whether a text has part in the step
    for (const auto& entry : _entries) {
        if (entry->state != State::Writing || !isWanted(*entry)) continue;
        writing.push_back(entry.get());
        texts.push_back(entry->text.get());
        steps.push_back(entry->text->chosen().empty());
    }
    if (writing.empty()) return false;
    const std::vector<EvaluatedRows> before = evaluatedBy(texts);
    const Clock::time_point started = Clock::now();
    try {
        stepTogether(texts, std::max<int64_t>(kDraftRows / static_cast<int64_t>(texts.size()) - 1, 0));
    } catch (const std::exception& error) {
        if (isOutOfMemory(error) && (makeRoom() || _tasks.isUnderWay())) return true;
        for (Entry* entry : writing) finish(*entry, failed(error));
        return true;
    }
    const double seconds = since(started);
    _pace.countStep(seconds);
    AgainRows rows;
    for (size_t i = 0; i < texts.size(); ++i) rows.add(*texts[i], before[i], {});
    noteShared();
    note([&](SchedulerCounts& counts) {
        ++counts.steps;
        counts.stepSeconds += seconds;
        counts.countAgain(rows, seconds);
        for (const Continuation* text : texts) counts.stepTokens += static_cast<int64_t>(text->chosen().size());
    });
    for (size_t i = 0; i < writing.size(); ++i) {
        Spent& spent = writing[i]->figures.spent;
        if (steps[i]) spent.stepSeconds += seconds;
        spent.drafts = texts[i]->held().running().drafter.counts();
        try {
            hand(*writing[i]);
        } catch (const std::exception& error) {
            finish(*writing[i], failed(error));
        }
    }
    for (const Entry* entry : writing) entry->answer->announce();
    return true;
}

// Gives new tokens to the client. None: the context is full.
void Scheduler::hand(Entry& entry) {
    std::vector<Chosen> tokens = entry.text->hand(SIZE_MAX);
    const ConstraintFollower& constraint = entry.text->held().running().constraint;
    if (!constraint.failure().empty()) return finish(entry, {Finish::Failed, constraint.failure()});
    const Request& request = entry.request;
    std::optional<Ending> ended;
    if (tokens.empty()) ended = Ending{Finish::Context};
    size_t handed = 0;
    for (; handed < tokens.size() && !ended; ++handed) {
        const int32_t token = tokens[handed].token;
        if (token < 0) {
            ended = Ending{Finish::Failed, kNoTokenMayBeChosen, ErrorKind::InvalidArgument};
            break;
        }
        if (std::binary_search(request.ends.begin(), request.ends.end(), token)) {
            ended = Ending{Finish::EndToken};
            break;
        }
        if (++entry.figures.tokens == request.maxTokens) ended = Ending{Finish::Length};
    }
    if (constraint.hasEnded() && handed == tokens.size()) ended = Ending{Finish::EndToken};
    tokens.resize(handed);
    if (entry.figures.firstTokenSeconds == 0) entry.figures.firstTokenSeconds = since(entry.submitted);
    entry.answer->add(std::move(tokens), entry.figures.spent);
    if (ended) finish(entry, std::move(*ended));
}

void Scheduler::finish(Entry& entry, Ending ending) {
    if (entry.hasEnded) return;
    entry.hasEnded = true;
    entry.figures.seconds = since(entry.submitted);
    if (entry.text && entry.hasBegun) entry.figures.spent.drafts = entry.text->held().running().drafter.counts();
    note([&](SchedulerCounts& counts) {
        ++counts.finished;
        counts.countStates(_entries);
    });
    entry.request.extras = {};
    if (entry.text) entry.text->endAnswer();
    ending.figures = entry.figures;
    entry.answer->end(std::move(ending));
}

// Once the device is lost, no request is taken any more.
Ending Scheduler::failed(const std::exception& error) {
    Ending ending = failure(error);
    if (ending.kind == ErrorKind::DeviceLost)
        note([&](SchedulerCounts& counts) { counts.failure = failure(error).error; });
    return ending;
}

// What requests that have ended leave in the cache stays, so that a prompt that continues it need not compute it again:
// their shared pages and, if these do not hold all of a text, the texts. A conversation has its text back.
void Scheduler::removeFinished() {
    _kept.reserve(_entries.size());  // so that no text is moved unless all are
    for (const auto& entry : _entries) {
        if (!entry->hasEnded || !entry->text) continue;
        if (entry->hasBegun) _past.add(*entry);
        if (const auto& conversation = entry->request.conversation) {
            conversation->giveBack(std::move(entry->text));
            _kept.use(*conversation);
        } else if (entry->hasBegun && _keepsTexts) {
            _kept.keep(std::move(entry->text));
        }
    }
    const auto hasEnded = [](const auto& entry) { return entry->hasEnded; };
    const size_t before = _entries.size();
    _entries.erase(std::remove_if(_entries.begin(), _entries.end(), hasEnded), _entries.end());
    if (_entries.size() < before) noteShared();
}

// Takes the memory of one text in the cache. The first of these that exists gives it: a text that no request works at,
// other than `except`; an answer whose reader seems to have gone; and, if at least `leastRunning` requests run, an
// answer whose reader is behind, or the request that came last among those with the lowest priority. A request goes on
// later, from where it was. Returns false if there is none of these.
bool Scheduler::makeRoom(int64_t leastRunning, const Continuation* except) {
    if (_kept.giveWay(except)) return true;
    const bool enough = runningOf(_entries) >= leastRunning;
    Entry *behind = nullptr, *last = nullptr;
    for (const auto& entry : _entries) {
        if (entry->state == State::Waiting || entry->hasEnded) continue;
        if (isIdle(*entry)) {
            behind = entry.get();
            break;
        }
        if (enough && !behind && entry->answer->isBehind()) behind = entry.get();
        if (!last || entry->request.priority <= last->request.priority) last = entry.get();
    }
    Entry* const chosen = behind ? behind : enough ? last : nullptr;
    if (!chosen) return false;
    chosen->text->setAside();
    chosen->state = State::Waiting;
    if (!behind) ++chosen->figures.pauses;
    note([](SchedulerCounts& counts) { ++counts.pauses; });
    return true;
}

}  // namespace sharpi
