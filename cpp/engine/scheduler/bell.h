// Wakes the scheduler's thread.
#pragma once

#include <condition_variable>
#include <mutex>

namespace sharpi {

// Clients have it too, and may ring it when the scheduler is gone.
struct Bell {
    std::mutex mutex;
    std::condition_variable rung;
    // Whoever waits looks again.
    void ring() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
        }
        rung.notify_all();
    }
};

}  // namespace sharpi
