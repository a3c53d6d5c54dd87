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

// The pipe holds one byte from wake() on until the next drain().
std::vector<int64_t> Arrivals::drain() {
    std::lock_guard<std::mutex> lock(_mutex);
    std::vector<int64_t> numbers;
    numbers.reserve(_count);
    if (std::exchange(_isReadable, false)) {
        char byte;
        [[maybe_unused]] const ssize_t taken = read(_ends[0], &byte, 1);
    }
    while (_first) {
        numbers.push_back(_first->number());
        _first->_hasArrived = false;
        _first = std::exchange(_first->_next, nullptr);
    }
    _last = nullptr;
    _count = 0;
    return numbers;
}

void Arrivals::add(Answer& answer) {
    std::lock_guard<std::mutex> lock(_mutex);
    if (std::exchange(answer._hasArrived, true)) return;
    (_last ? _last->_next : _first) = &answer;
    _last = &answer;
    ++_count;
}

void Arrivals::wake() {
    std::lock_guard<std::mutex> lock(_mutex);
    if (!_first) return;
    if (!std::exchange(_isReadable, true)) [[maybe_unused]]
        const ssize_t written = write(_ends[1], "", 1);
}

// The pipe's byte stays: if the answer was the only one, drain() finds nothing.
void Arrivals::remove(Answer& answer) {
    std::lock_guard<std::mutex> lock(_mutex);
    if (!answer._hasArrived) return;
    Answer *before = nullptr, *at = _first;
    while (at != &answer) before = std::exchange(at, at->_next);
    (before ? before->_next : _first) = answer._next;
    if (_last == &answer) _last = before;
    --_count;
}

Answer::~Answer() {
    if (_arrivals) _arrivals->remove(*this);
}

template <typename HasNews, typename Take>
Answer::News Answer::await(double seconds, const HasNews& hasNews, const Take& take) {
    News news;
    bool mayGoOn = false;
    {
        std::unique_lock<std::mutex> lock(_mutex);
        _changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return _hasEnded || hasNews(); });
        take(news);
        mayGoOn = countTaken(news);
    }
    if (mayGoOn && _bell) _bell->ring();
    return news;
}

Answer::News Answer::take(double seconds) {
    return await(
        seconds, [&] { return !_news.tokens.empty() || _news.promptScores; },
        [&](News& news) { news = std::exchange(_news, {}); });
}

Answer::News Answer::takeOne(double seconds) {
    return await(
        seconds, [&] { return !_news.tokens.empty(); },
        [&](News& news) {
            if (_news.tokens.empty()) {
                news.ending = std::exchange(_news.ending, std::nullopt);
                return;
            }
            news.tokens.push_back(std::move(_news.tokens.front()));
            _news.tokens.erase(_news.tokens.begin());
            if (!isCounted()) return;
            news.spent.push_back(_news.spent.front());
            _news.spent.erase(_news.spent.begin());
        });
}

// The lock must be held. Returns whether the answer waited for its reader, and no longer does.
bool Answer::countTaken(const News& news) {
    const bool waited = isBehind();
    const auto tokens = static_cast<int64_t>(news.tokens.size());
    _unread -= tokens;
    _readTokens += tokens + (news.ending && news.ending->finish == Finish::EndToken ? 1 : 0);
    return waited && !isBehind();
}

void Answer::cancel() {
    _isCancelled = true;
    if (_bell) _bell->ring();
}

void Answer::setProgress(int64_t computedTokens, int64_t reusedTokens) {
    _reusedTokens = reusedTokens;
    _computedTokens = computedTokens;
}

// If there is no memory for all, none are added.
void Answer::add(std::vector<Chosen> tokens, const Spent& spent) {
    if (tokens.empty()) return;
    {
        std::lock_guard<std::mutex> lock(_mutex);
        const size_t wanted = _news.tokens.size() + tokens.size();
        if (_news.tokens.capacity() < wanted) _news.tokens.reserve(std::max(wanted, 2 * _news.tokens.capacity()));
        if (isCounted() && _news.spent.capacity() < wanted)
            _news.spent.reserve(std::max(wanted, 2 * _news.spent.capacity()));
        std::move(tokens.begin(), tokens.end(), std::back_inserter(_news.tokens));
        if (isCounted()) _news.spent.resize(wanted, spent);
        _unread += static_cast<int64_t>(tokens.size());
    }
    if (_arrivals) _arrivals->add(*this);
}

void Answer::add(const std::vector<Score>& promptScores) {
    {
        std::lock_guard<std::mutex> lock(_mutex);
        _news.promptScores = promptScores;
    }
    arrive();
}

void Answer::end(Ending ending) {
    {
        std::lock_guard<std::mutex> lock(_mutex);
        _news.ending = std::move(ending);
        _hasEnded = true;
    }
    arrive();
}

void Answer::arrive() {
    if (_arrivals) _arrivals->add(*this);
    announce();
}

void Answer::announce() {
    _changed.notify_all();
    if (_arrivals) _arrivals->wake();
}

}  // namespace sharpi
