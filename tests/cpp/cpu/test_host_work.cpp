// What the host does beside a pass: jobs run at once beside launches, and are listed beside a capture.
#include <gtest/gtest.h>

#include "cpu/share/host_work.h"

namespace {

using namespace sharpi;

TEST(HostWork, JobsBesideLaunchesRunOnceAndAtOnce) {
    HostWork work(HostWork::When::AtOnce);
    int done = 0;
    work.add([&] { ++done; });
    EXPECT_EQ(done, 1);
    EXPECT_TRUE(work.empty());
    work.run();
    EXPECT_EQ(done, 1);
}

TEST(HostWork, ListedJobsRunInOrderEachTime) {
    HostWork work(HostWork::When::Later);
    std::vector<int> done;
    for (const int job : {1, 2, 3}) work.add([&done, job] { done.push_back(job); });
    EXPECT_TRUE(done.empty());
    EXPECT_FALSE(work.empty());
    const HostWork kept = std::move(work);
    kept.run();
    kept.run();
    EXPECT_EQ(done, (std::vector<int>{1, 2, 3, 1, 2, 3}));
}

TEST(HostWork, EachPassCountsItsOwnTickets) {
    HostWork first(HostWork::When::Later), second(HostWork::When::AtOnce);
    for (const uint32_t expected : {1u, 2u, 3u}) {
        EXPECT_EQ(first.nextSent(), expected);
        EXPECT_EQ(first.nextReturned(), expected);
    }
    EXPECT_EQ(first.nextInstructed(), 1u);
    EXPECT_EQ(second.nextSent(), 1u);
    EXPECT_EQ(second.nextInstructed(), 1u);
    EXPECT_EQ(second.nextReturned(), 1u);
}

}  // namespace
