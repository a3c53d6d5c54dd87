// Records steps and replays them. A step's launches are captured once for each shape: a kind of pass, a number of rows,
// a number of rows that want logits, a length of texts. What the host does beside the launches is recorded with them.
//
// A record serves its own number of rows only. A larger record with idle rows would have to keep these from writing
// pages and states and from choosing experts, and would save only captures, which take less than a few steps. When the
// limit on records is reached, a new one takes the place of the least recently used.
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

class StepRecorder : public Recording {
public:
    // failed: called after a pass has failed, with whether some of it ran; it must not throw. If nothing ran, the next
    // pass begins as if there had been none.
    StepRecorder(CudaPass& pass, std::function<void(bool ran)> failed);

    // Runs body over the batch at hand: replays its record, or launches it. See Backend::region().
    void run(Pass which, const std::function<void()>& body);
    void clear();

    bool replays() const override { return _replays; }
    void setReplays(bool replay) override { _replays = replay; }
    int64_t kernelsPerStep() const override { return _kernelsPerStep; }
    // Whether there was no memory to record some step. Also asked while a step runs.
    bool withoutRecord() const { return _withoutRecord; }

private:
    struct Step {
        std::unique_ptr<cuda::Graph> graph;
        HostWork work{HostWork::When::Later};
        int64_t used = 0;  // when it was replayed last, in steps that were asked for
    };
    // Rows, rows that want logits, whether recurrent layers take all rows in one launch, and how long texts are.
    using Shape = std::tuple<Pass, int64_t, int64_t, bool, cuda::BatchDepth>;
    Shape shapeOf(Pass which) const;
    const Step* recorded(Pass which, const std::function<void()>& body);
    bool worthRecording(const Shape& shape);
    void makeRoom();
    void replay(const Step& step);
    void launch(Pass which, const std::function<void()>& body);
    void makeLaunches(Pass which, const std::function<void()>& body, HostWork& work);

    CudaPass& _pass;
    std::function<void(bool ran)> _failed;
    std::map<Shape, Step> _steps;
    std::set<Shape> _met;  // shapes of many rows that have come before
    int64_t _asked = 0;    // steps that could be replayed
    std::atomic<bool> _withoutRecord{false};
    bool _replays;
    int64_t _kernelsPerStep = 0;
};

}  // namespace sharpi
