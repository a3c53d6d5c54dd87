// See answer.h.
#include "engine/scheduler/answer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "core/error.h"

namespace sharpi {

const char* finishName(Finish finish) {
    switch (finish) {
    case Finish::EndToken: return "end";
    case Finish::Length: return "length";
    case Finish::Context: return "context";
    case Finish::Cancelled: return "cancelled";
    case Finish::TimeOut: return "timeout";
    case Finish::Failed: return "failed";
    }
    return "";
}

Arrivals::Arrivals() {
    if (pipe(_ends) != 0) throw Error(ErrorKind::Internal, "the system gives no pipe: too many files are open");
    for (const int end : _ends) {
        fcntl(end, F_SETFL, O_NONBLOCK);
        fcntl(end, F_SETFD, FD_CLOEXEC);
    }
}

Arrivals::~Arrivals() {
    for (const int end : _ends) close(end);
}

// The pipe holds one byte while there are numbers, and none otherwise.
std::vector<int64_t> Arrivals::drain() {
    std::lock_guard<std::mutex> lock(_mutex);
    if (!_numbers.empty()) {
        char byte;
        [[maybe_unused]] const ssize_t taken = read(_ends[0], &byte, 1);
    }
    return std::exchange(_numbers, {});
}

void Arrivals::add(int64_t answer) {
    std::lock_guard<std::mutex> lock(_mutex);
    const bool wasEmpty = _numbers.empty();
    _numbers.push_back(answer);
    if (wasEmpty) [[maybe_unused]]
        const ssize_t written = write(_ends[1], "", 1);
}

Answer::News Answer::take(double seconds) {
    std::unique_lock<std::mutex> lock(_mutex);
    _changed.wait_for(lock, std::chrono::duration<double>(seconds),
                      [&] { return _hasEnded || !_news.tokens.empty() || _news.promptScores; });
    return std::exchange(_news, {});
}

void Answer::setProgress(int64_t computedTokens, int64_t reusedTokens) {
    _reusedTokens = reusedTokens;
    _computedTokens = computedTokens;
}

void Answer::add(std::vector<Chosen> tokens) {
    if (tokens.empty()) return;
    {
        std::lock_guard<std::mutex> lock(_mutex);
        std::move(tokens.begin(), tokens.end(), std::back_inserter(_news.tokens));
    }
    announce();
}

void Answer::add(const std::vector<Score>& promptScores) {
    {
        std::lock_guard<std::mutex> lock(_mutex);
        _news.promptScores = promptScores;
    }
    announce();
}

void Answer::end(Ending ending) {
    {
        std::lock_guard<std::mutex> lock(_mutex);
        _news.ending = std::move(ending);
        _hasEnded = true;
    }
    announce();
}

void Answer::announce() {
    _changed.notify_all();
    if (_arrivals) _arrivals->add(_number);
}

}  // namespace sharpi
