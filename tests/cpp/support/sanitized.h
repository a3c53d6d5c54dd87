// Whether a sanitizer watches this build. It looks for wrong accesses and races, which a part of a long test's runs
// shows; whether answers are right is tested without it.
#pragma once

#include <cstdint>

namespace sharpi {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif
#else
constexpr bool kIsSanitized = false;
#endif

// Of so many runs of a long test, those that a sanitizer watches.
constexpr int64_t watchedRuns(int64_t runs) { return kIsSanitized ? (runs + 1) / 2 : runs; }

}  // namespace sharpi
