// Wakes the scheduler's thread.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <mutex>

namespace sharpi {

// Clients have it too, and may ring it when the scheduler is gone.
struct Bell {
    std::mutex mutex;
    std::condition_variable rung;
    const pid_t process = getpid();
    // Whoever waits looks again. In a forked process nobody does, and the mutex may be locked for ever.
    void ring() {
        if (getpid() != process) return;
        {
            const std::lock_guard<std::mutex> lock(mutex);
        }
        rung.notify_all();
    }
};

}  // namespace sharpi
