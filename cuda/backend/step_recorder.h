// Records steps and replays them. A step's launches are captured once for each shape: a kind of pass, a number of rows,
// a number of rows that want logits. What the host does beside the launches is recorded with them.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "backend/cuda_pass.h"
#include "device/stream.h"
#include "operations/backend.h"

namespace sharpi {

class StepRecorder {
public:
    // giveUp: settles everything after a pass failed half way; it must not throw. recovered: a pass failed before
    // anything ran, and the next one begins as if it had not been.
    StepRecorder(CudaPass& pass, std::function<void()> giveUp, std::function<void()> recovered);

    // Runs body over the batch at hand: replays its record, or launches it. See Backend::region().
    void run(Pass which, const std::function<void()>& body);
    void clear();

    // These are also asked for while a step runs.
    bool replays() const { return _replays; }
    void setReplays(bool replay) { _replays = replay; }
    int64_t kernelsPerStep() const { return _kernelsPerStep; }  // launched by the last pass through the model
    bool withoutRecord() const { return _withoutRecord; }       // there was no memory to record some step

private:
    struct Step {
        std::unique_ptr<cuda::Graph> graph;
        HostWork work{HostWork::When::Later};
    };
    using Shape = std::tuple<Pass, int64_t, int64_t>;  // rows, rows that want logits
    const Step* recorded(Pass which, const std::function<void()>& body);
    bool worthRecording(const Shape& shape);
    void replay(const Step& step);
    void launch(Pass which, const std::function<void()>& body);
    void makeLaunches(Pass which, const std::function<void()>& body, HostWork& work);

    CudaPass& _pass;
    std::function<void()> _giveUp, _recovered;
    std::map<Shape, Step> _steps;
    std::set<Shape> _met;  // shapes of many rows that have come before
    std::atomic<bool> _replays, _withoutRecord{false};
    std::atomic<int64_t> _kernelsPerStep{0};
};

}  // namespace sharpi
