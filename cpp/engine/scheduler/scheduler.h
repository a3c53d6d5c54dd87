// Serves many requests with one model. One thread composes the passes: a step for all answers that are being written,
// then pieces of prompts, in turn. What a request is answered does not depend on the others, on when they come, or
// on how often it was paused.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/scheduler/answer.h"
#include "engine/scheduler/conversation.h"
#include "engine/scheduler/counting/counts.h"
#include "engine/scheduler/counting/past_texts.h"
#include "engine/scheduler/counting/turn_clock.h"
#include "engine/scheduler/entry.h"
#include "engine/scheduler/kept_texts.h"
#include "engine/scheduler/pace.h"
#include "engine/scheduler/task.h"
#include "engine/texts/continuation.h"

namespace sharpi {

struct SchedulerOptions {
    double greatestGap = 0.2;  // seconds that an answer should at most wait for prompts of others
    int64_t queue = 64;        // requests that may wait; more are refused
    int64_t running = 0;       // requests that may hold memory at a time; 0: as many as the model has room for
    // RAM for copies of recurrent states, from which prompts that begin alike continue, and for copies of shared pages
    // that the device had to give up.
    size_t statesBytes = size_t{1} << 30, spillBytes = size_t{1} << 30;
    // Where copies go that have no room in RAM, and all when the scheduler ends. The scheduler sets its identity.
    CacheDirectoryOptions directory = {};
    std::string file;  // tells the model's file from any other, and all that Python knows of what decides its bits
};

class Scheduler {
public:
    Scheduler(std::shared_ptr<Engine> engine, const SchedulerOptions& options);
    ~Scheduler();
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    // Any thread may call it. Throws Error(InvalidArgument) for a request that can never be served, Error(Busy) if the
    // queue is full, and Error(DeviceLost) once the device has failed. arrivals: where the answer's news is announced,
    // if anybody waits there.
    std::shared_ptr<Answer> submit(Request request, std::shared_ptr<Arrivals> arrivals = nullptr);
    // Has work done between passes. Long tasks follow each other, one piece in each turn; short ones wait for none. For
    // all of it other requests may be paused.
    std::shared_ptr<Task> perform(std::function<bool()> piece, Task::Length length = Task::Length::Long);
    // Finds out a conversation's tokens: those that were evaluated and read. `tokens` must live until the task is over.
    std::shared_ptr<Task> readTokens(std::shared_ptr<const Conversation> conversation, std::vector<int32_t>& tokens);
    // Cancels a conversation's request and forgets its text. It can begin anew.
    std::shared_ptr<Task> forget(std::shared_ptr<Conversation> conversation);
    // Cancels all requests, and waits until the thread has ended. Any thread but that one may call it.
    void close();
    SchedulerCounts counts() const;

private:
    using Clock = SchedulerClock;
    using Entry = RequestEntry;
    using State = RequestState;

    void work();
    void takeTurn();
    bool collect();
    void endOverdue();
    // What the others of a pass will take of the cache.
    struct Promised {
        int64_t pages = 0;
        int32_t states = 0;
    };
    Entry* nextToPrepare(const std::vector<Entry*>& taken, const Promised& promised);
    bool admit(Entry& entry, const Promised& promised);
    bool begin(Entry& entry);
    std::vector<Entry*> prompts(int64_t rows);
    void prepare(const std::vector<Entry*>& group, int64_t rows);
    bool write();
    void hand(Entry& entry);
    void finish(Entry& entry, Ending ending);
    Ending failed(const std::exception& error);
    void removeFinished();
    bool makeRoom(int64_t leastRunning = 2, const Continuation* except = nullptr);
    void noteShared();
    template <typename Change> void note(const Change& change);

    const std::shared_ptr<Engine> _engine;
    const SchedulerOptions _options;
    const int64_t _mostRunning;
    const bool _keepsTexts;  // of requests that have ended
    uint64_t _store = 0;     // its number (PrefixStore::open)

    const std::shared_ptr<Bell> _bell = std::make_shared<Bell>();  // its mutex guards the following
    RequestEntries _submitted;
    Tasks _submittedTasks;
    SchedulerCounts _counts;
    int64_t _numbers = 0;
    bool _isEnding = false;

    // The thread's own.
    RequestEntries _entries;  // in the order in which they came
    KeptTexts _kept;
    PastTexts _past;
    TaskQueue _tasks;
    Pace _pace;
    TurnClock _clock;
    std::mutex _closing;
    std::thread _thread;  // the last member: it uses all others
};

}  // namespace sharpi
