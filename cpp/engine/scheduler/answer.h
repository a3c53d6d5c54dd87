// The tokens of a request on their way from the scheduler's thread to a client's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/scheduler/request.h"

namespace sharpi {

class Answer;

// Says which answers have something new, to a thread that waits for many of them at once. Any thread may call it.
class Arrivals {
public:
    // Throws Error(Internal) if the system gives no pipe.
    Arrivals();
    ~Arrivals();
    Arrivals(const Arrivals&) = delete;
    Arrivals& operator=(const Arrivals&) = delete;

    // Readable while answers have something new; for poll() and the like. Never read from it: call drain().
    int descriptor() const { return _ends[0]; }
    // The numbers of the answers with something new since the last call.
    std::vector<int64_t> drain();
    // Takes no memory, so that no news is lost when there is none.
    void add(Answer& answer);
    void remove(Answer& answer);

private:
    int _ends[2] = {-1, -1};
    std::mutex _mutex;                           // guards the following, and Answer::_next and _hasArrived
    Answer *_first = nullptr, *_last = nullptr;  // with news; each names the next
    size_t _count = 0;                           // of them
    bool _isReadable = false;
};

class Answer {
public:
    // arrivals: where news is announced, if anybody waits there.
    Answer(int64_t number, std::shared_ptr<Arrivals> arrivals) : _number(number), _arrivals(std::move(arrivals)) {}
    ~Answer();
    Answer(const Answer&) = delete;
    Answer& operator=(const Answer&) = delete;

    struct News {
        std::vector<Chosen> tokens;
        std::optional<std::vector<Score>> promptScores;  // of a request with echo: of its prompt, before all tokens
        std::optional<Ending> ending;                    // after the tokens
    };
    int64_t number() const { return _number; }
    // What is new since the last call. Waits for it, but no longer than `seconds`; once the answer has ended, not at
    // all.
    News take(double seconds);
    // The client wants no more. The answer ends at the scheduler's next look.
    void cancel() { _isCancelled = true; }
    bool isCancelled() const { return _isCancelled; }
    // How many of the prompt's tokens the cache has, and how many it had before; final once there are tokens.
    int64_t computedTokens() const { return _computedTokens; }
    int64_t reusedTokens() const { return _reusedTokens; }

    // For the scheduler.
    void setProgress(int64_t computedTokens, int64_t reusedTokens);
    void add(std::vector<Chosen> tokens);
    void add(const std::vector<Score>& promptScores);
    void end(Ending ending);

private:
    friend class Arrivals;
    void announce();

    const int64_t _number;
    const std::shared_ptr<Arrivals> _arrivals;
    Answer* _next = nullptr;   // in the arrivals' list
    bool _hasArrived = false;  // it is in that list
    std::atomic<bool> _isCancelled{false};
    std::atomic<int64_t> _computedTokens{0}, _reusedTokens{0};
    std::mutex _mutex;
    std::condition_variable _changed;
    News _news;
    bool _hasEnded = false;
};

}  // namespace sharpi
