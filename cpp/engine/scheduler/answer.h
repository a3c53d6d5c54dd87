// The tokens of a request on their way from the scheduler's thread to a client's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/scheduler/bell.h"
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
    // Takes no memory, so that no news is lost when there is none. The thread that waits is told by wake().
    void add(Answer& answer);
    // Wakes it, if there is something new.
    void wake();
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
    // arrivals: where news is announced, if anybody waits there. ahead: see Request. bell: rung when the answer may be
    // written on, and when nobody wants it any more.
    Answer(int64_t number, std::shared_ptr<Arrivals> arrivals, int64_t ahead = std::numeric_limits<int64_t>::max(),
           std::shared_ptr<Bell> bell = nullptr)
        : _number(number), _arrivals(std::move(arrivals)), _ahead(ahead), _bell(std::move(bell)) {}
    ~Answer();
    Answer(const Answer&) = delete;
    Answer& operator=(const Answer&) = delete;

    struct News {
        std::vector<Chosen> tokens;
        std::vector<Spent> spent;  // until each of the tokens came, on an answer whose reader counts
        std::optional<std::vector<Score>> promptScores;  // of a request with echo: of its prompt, before all tokens
        std::optional<Ending> ending;                    // after the tokens
    };
    int64_t number() const { return _number; }
    // What is new since the last call. Waits for it, but no longer than `seconds`; once the answer has ended, not at
    // all.
    News take(double seconds);
    // The same for a reader who counts (see readTokens()): one token, or else the ending.
    News takeOne(double seconds);
    // The client wants no more. The answer ends at the scheduler's next look.
    void cancel();
    bool isCancelled() const { return _isCancelled; }
    // How many of the prompt's tokens the cache has, and how many it had before; final once there are tokens.
    int64_t computedTokens() const { return _computedTokens; }
    int64_t reusedTokens() const { return _reusedTokens; }

    // The tokens that were taken, with the end token, if the answer was taken up to it.
    int64_t readTokens() const { return _readTokens; }

    // For the scheduler.
    // Whether its reader counts: it takes one token at a time, and the answer waits for it.
    bool isCounted() const { return _ahead != std::numeric_limits<int64_t>::max(); }
    // Whether as many tokens as may be are written ahead of the reader.
    bool isBehind() const { return _unread >= _ahead; }
    void setProgress(int64_t computedTokens, int64_t reusedTokens);
    // Who waits is told by announce(): if many answers have tokens, that wakes a thread once, after it all.
    void add(std::vector<Chosen> tokens, const Spent& spent);
    void announce();
    void add(const std::vector<Score>& promptScores);
    void end(Ending ending);

private:
    friend class Arrivals;
    void arrive();
    bool countTaken(const News& news);
    template <typename HasNews, typename Take> News await(double seconds, const HasNews& hasNews, const Take& take);

    const int64_t _number;
    const std::shared_ptr<Arrivals> _arrivals;
    const int64_t _ahead;
    const std::shared_ptr<Bell> _bell;
    Answer* _next = nullptr;   // in the arrivals' list
    bool _hasArrived = false;  // it is in that list
    std::atomic<bool> _isCancelled{false};
    std::atomic<int64_t> _computedTokens{0}, _reusedTokens{0}, _unread{0}, _readTokens{0};
    std::mutex _mutex;
    std::condition_variable _changed;
    News _news;
    bool _hasEnded = false;
};

}  // namespace sharpi
