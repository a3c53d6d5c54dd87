// See step_recorder.h.
#include "backend/step_recorder.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "core/error.h"

namespace sharpi {

namespace {

bool replayWanted() {
    const char* value = std::getenv("SHARPI_CUDA_GRAPH");
    return !value || std::strcmp(value, "0") != 0;
}

}  // namespace

StepRecorder::StepRecorder(CudaPass& pass, std::function<void(bool ran)> failed)
    : _pass(pass), _failed(std::move(failed)), _replays(replayWanted()) {}

void StepRecorder::run(Pass which, const std::function<void()>& body) {
    const int64_t before = _pass.stream.launches();
    const Step* const step = recorded(which, body);
    if (step) replay(*step);
    else launch(which, body);
    if (which == Pass::Model) _kernelsPerStep = _pass.stream.launches() - before;
}

void StepRecorder::clear() {
    _steps.clear();
    _met.clear();
    _withoutRecord = false;
}

StepRecorder::Shape StepRecorder::shapeOf(Pass which) const {
    const bool inSteps = !_pass.limits.recurrent() || _pass.statesInSteps();
    return {which, _pass.view.rows, _pass.logitRows, inSteps, _pass.view.exact.depth};
}

// The steps of one text have few rows, and their numbers of rows come again. Other numbers are recorded when they do.
bool StepRecorder::worthRecording(const Shape& shape) {
    return _pass.view.rows <= kMostDraftRows || !_met.insert(shape).second;
}

// No record is being replayed: the pass has begun, so the one before it is over.
void StepRecorder::makeRoom() {
    constexpr size_t kMostRecords = 64;
    const auto before = [](const auto& a, const auto& b) { return a.second.used < b.second.used; };
    while (_steps.size() >= kMostRecords) _steps.erase(std::min_element(_steps.begin(), _steps.end(), before));
}

// The record of a step of this shape, made at the first one; null if there is none. The first pass over the weights
// brings over those that stay, so it cannot be recorded.
const StepRecorder::Step* StepRecorder::recorded(Pass which, const std::function<void()>& body) {
    if (!_pass.step || !_replays || !_pass.weights->uploaded()) return nullptr;
    const Shape shape = shapeOf(which);
    ++_asked;
    if (const auto known = _steps.find(shape); known != _steps.end()) {
        known->second.used = _asked;
        return &known->second;
    }
    if (_withoutRecord || !worthRecording(shape)) return nullptr;
    makeRoom();
    Step step;
    step.used = _asked;
    try {
        step.graph = _pass.stream.capture([&] { makeLaunches(which, body, step.work); });
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::OutOfMemory) throw;
        // Nothing has run. Without memory for their records, this step and others like it are launched.
        _withoutRecord = true;
        _failed(false);
        return nullptr;
    }
    return &_steps.insert_or_assign(shape, std::move(step)).first->second;
}

void StepRecorder::launch(Pass which, const std::function<void()>& body) {
    std::optional<HostShare::Awake> awake;
    if (_pass.share && _pass.step) awake.emplace(*_pass.share);
    HostWork work(HostWork::When::AtOnce);
    _pass.clock.launched();
    // If the CPU takes part in the step, it computes between the launches.
    std::optional<HostClock::Evaluation> evaluation;
    if (awake) evaluation.emplace(_pass.clock);
    makeLaunches(which, body, work);
}

// What the GPU does in a pass, with weights on their way meanwhile.
void StepRecorder::makeLaunches(Pass which, const std::function<void()>& body, HostWork& work) {
    struct Made {
        HostWork*& at;
        ~Made() { at = nullptr; }
    } made{_pass.work};
    _pass.work = &work;
    _pass.forgetInputs();
    try {
        _pass.weights->begin(partOf(which), _pass.step, _pass.logitRows > 0);
        body();
        _pass.weights->end();
    } catch (...) {
        _failed(true);
        throw;
    }
}

void StepRecorder::replay(const Step& step) {
    _pass.stream.replay(*step.graph);
    _pass.clock.launched();
    if (step.work.empty()) return;
    const HostClock::Evaluation evaluation(_pass.clock);
    const HostShare::Awake awake(*_pass.share);
    try {
        step.work.run();
    } catch (...) {
        _failed(true);
        throw;
    }
}

}  // namespace sharpi
