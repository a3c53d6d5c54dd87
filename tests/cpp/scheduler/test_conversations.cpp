// Conversations of the scheduler: each of their requests is answered as if it were alone, whoever had their memory in
// the meantime and wherever their readers stopped.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "answers.h"
#include "engine/scheduler/scheduler.h"
#include "engine/session.h"
#include "scored_text.h"
#include "seed.h"
#include "two_arithmetics.h"

namespace {

using namespace sharpi;
using namespace tiny;

std::vector<int32_t> tokensOf(Scheduler& scheduler, const std::shared_ptr<Conversation>& conversation) {
    std::vector<int32_t> tokens;
    EXPECT_TRUE(scheduler.readTokens(conversation, tokens)->wait(kForever));
    return tokens;
}

// Reads up to `most` tokens; fewer if the answer ends before.
std::vector<int32_t> read(Answer& answer, size_t most) {
    std::vector<int32_t> tokens;
    while (tokens.size() < most) {
        const Answer::News news = answer.takeOne(kForever);
        if (news.tokens.empty()) {
            EXPECT_TRUE(news.ending);
            if (news.ending) {
                EXPECT_EQ(news.ending->finish, Finish::Length) << news.ending->error;
            }
            break;
        }
        tokens.push_back(news.tokens.front().token);
    }
    return tokens;
}

// Conversations that meet in a cache with room for two of them, turn after turn. Some readers stop half way.
void converse(Scheduler& scheduler, const std::shared_ptr<Engine>& reference, const Model& model, unsigned seed) {
    constexpr size_t kConversations = 6;
    std::mt19937 random(testSeed(seed));
    const int64_t vocab = model.options().vocab;
    std::vector<std::shared_ptr<Conversation>> conversations;
    std::vector<std::vector<int32_t>> texts;
    for (size_t i = 0; i < kConversations; ++i) {
        conversations.push_back(std::make_shared<Conversation>(i % 2 ? "" : "salt"));
        texts.push_back(repetitive(20 + static_cast<int64_t>(random() % 120), vocab, random()));
    }
    for (int turn = 0; turn < 3; ++turn) {
        std::vector<Request> requests;
        std::vector<std::shared_ptr<Answer>> answers;
        for (size_t i = 0; i < kConversations; ++i) {
            Request& request = requests.emplace_back(requestOf(texts[i], 2 + static_cast<int64_t>(random() % 40)));
            if (random() % 2) request.params = sampledParams(random());
            if (random() % 2) request.drafts = drafts(Source::NGram, 4);
            request.conversation = conversations[i];
            request.ahead = 1 + static_cast<int64_t>(random() % 3);
            answers.push_back(scheduler.submit(request));
        }
        for (size_t i = 0; i < kConversations; ++i) {
            SCOPED_TRACE("turn " + std::to_string(turn) + " of conversation " + std::to_string(i));
            const auto wanted = static_cast<size_t>(requests[i].maxTokens);
            const size_t stop = random() % 2 ? wanted + 1 : 1 + random() % wanted;
            const std::vector<int32_t> said = read(*answers[i], stop);
            Session alone(reference);
            std::vector<int32_t> expected =
                generate(alone, texts[i], requests[i].params, static_cast<int>(requests[i].maxTokens));
            expected.resize(std::min(stop, expected.size()));
            ASSERT_EQ(said, expected);
            std::vector<int32_t>& text = texts[i];
            text.insert(text.end(), said.begin(), said.end() - 1);
            EXPECT_EQ(tokensOf(scheduler, conversations[i]), text);
            text.push_back(said.back());
            const std::vector<int32_t> more = randomTokens(1 + static_cast<int64_t>(random() % 20), vocab, random());
            text.insert(text.end(), more.begin(), more.end());
            if (random() % 8 == 0) {
                EXPECT_TRUE(scheduler.forget(conversations[i])->wait(kForever));
            }
        }
    }
    for (const auto& conversation : conversations) EXPECT_TRUE(scheduler.forget(conversation)->wait(kForever));
}

std::vector<Options> models() {
    Options experts;
    experts.architecture = "qwen3moe";
    return {gpuVariants()[0], experts, hybrids()[0], predicting()[1], withWindows()};
}

EngineOptions tight(const Options& options) {
    return engineOptions(contextOf(options), 64, seesWindows(options) ? 3 : 4);
}

TEST(Conversations, EveryTurnIsAnsweredAsAlone) {
    for (const Options& options : models()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options, contextOf(options));
        const auto reference = engineOf(model, engineOptions(contextOf(options), 64, 12));
        const auto engine = engineOf(model, tight(options));
        const int64_t pages = engine->runner().lock().kv().freePages();
        Scheduler scheduler(engine, longQueue());
        converse(scheduler, reference, model, 1);
        converse(scheduler, reference, model, 2);
        EXPECT_EQ(engine->runner().lock().kv().freePages(), pages);
    }
}

TEST(Conversations, RowsKeepTheirKinds) {
    for (const Options& options : models()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options, contextOf(options));
        const int64_t step = promptStepOf(options);
        const TwoArithmeticsEngine alone(model, engineOptions(contextOf(options), 64, 12), step);
        const TwoArithmeticsEngine together(model, tight(options), step);
        Scheduler scheduler(together.engine, longQueue());
        converse(scheduler, alone.engine, model, 3);
    }
}

TEST(Conversations, ALaterRequestEndsTheOneBeforeIt) {
    const Model model = modelOf(gpuVariants()[0], 512);
    const auto engine = engineOf(model, engineOptions(512, 64, 4));
    Scheduler scheduler(engine, longQueue());
    const auto conversation = std::make_shared<Conversation>("");
    std::vector<std::shared_ptr<Answer>> answers;
    {
        const LockedModel locked = engine->runner().lock();  // none is done before the last one comes
        for (unsigned i = 0; i < 5; ++i) {
            Request request = requestOf(randomTokens(70, model.options().vocab, i), 300);
            request.conversation = conversation;
            answers.push_back(scheduler.submit(request));
        }
    }
    for (unsigned i = 0; i < 5; ++i)
        EXPECT_EQ(wait(*answers[i]).ending.finish, i < 4 ? Finish::Cancelled : Finish::Length);
    EXPECT_EQ(tokensOf(scheduler, conversation).size(), 70U + 299U);
}

TEST(Conversations, OnlyAReaderWhoCountsIsToldWhatEachTokenTook) {
    const Model model = modelOf(gpuVariants()[0], 512);
    Scheduler scheduler(engineOf(model, engineOptions(512, 64, 4)), longQueue());
    for (const bool counts : {false, true}) {
        Request request = requestOf(randomTokens(70, model.options().vocab, 1), 20);
        if (counts) request.ahead = 2;
        const auto answer = scheduler.submit(request);
        size_t tokens = 0;
        double seconds = 0;
        for (Answer::News news; !news.ending;) {
            news = counts ? answer->takeOne(kForever) : answer->take(kForever);
            tokens += news.tokens.size();
            ASSERT_EQ(news.spent.size(), counts ? news.tokens.size() : 0);
            for (const Spent& spent : news.spent) {
                EXPECT_GT(spent.promptSeconds, 0);
                EXPECT_GE(spent.stepSeconds, seconds);
                seconds = spent.stepSeconds;
            }
        }
        EXPECT_EQ(tokens, 20U);
        EXPECT_EQ(seconds > 0, counts);
    }
}

TEST(Conversations, ATaskFindsRoomAndIsDoneInPieces) {
    const Model model = modelOf(gpuVariants()[0], 512);
    const auto engine = engineOf(model, engineOptions(512, 64, 4));
    Scheduler scheduler(engine, longQueue());
    std::vector<std::shared_ptr<Answer>> answers;
    for (unsigned i = 0; i < 3; ++i)
        answers.push_back(scheduler.submit(requestOf(randomTokens(90, model.options().vocab, i), 200)));
    std::unique_ptr<Continuation> text;
    const std::vector<int32_t> tokens = randomTokens(500, model.options().vocab, 9);
    const auto task = scheduler.perform([&] {
        if (!text) {
            auto begun = std::make_unique<Continuation>(engine);
            begun->beginEvaluation(tokens, RowKind::Prompt, nullptr);
            text = std::move(begun);
        }
        text->evaluatePiece(64);
        if (text->held().size() < 500) return false;
        text.reset();
        return true;
    });
    EXPECT_TRUE(task->wait(kForever));
    EXPECT_GT(scheduler.counts().pauses, 0);
    for (unsigned i = 0; i < 3; ++i) {
        Session alone(engineOf(model, engineOptions(512, 64, 4)));
        EXPECT_EQ(wait(*answers[i]).tokens,
                  generate(alone, randomTokens(90, model.options().vocab, i), greedyParams(), 200));
    }
    const auto wrong = scheduler.perform([]() -> bool { throw Error(ErrorKind::Busy, "told to"); });
    EXPECT_THROW(wrong->wait(kForever), Error);
    scheduler.close();
    EXPECT_THROW(scheduler.perform([] { return true; }), Error);
    EXPECT_THROW(scheduler.submit(requestOf({1}, 1)), Error);
}

TEST(Conversations, OnlyLongTasksWaitForALongOne) {
    const Model model = modelOf(gpuVariants()[0], 512);
    Scheduler scheduler(engineOf(model, engineOptions(512, 64, 4)), longQueue());
    const auto conversation = std::make_shared<Conversation>("");
    Request request = requestOf(randomTokens(70, model.options().vocab, 1), 3);
    request.conversation = conversation;
    wait(*scheduler.submit(request));

    std::atomic<bool> mayEnd{false};
    std::atomic<int> pieces{0}, others{0};
    const auto first = scheduler.perform([&] { return ++pieces > 2 && mayEnd; });
    const auto second = scheduler.perform([&] { return ++others > 0; });
    const auto third = scheduler.perform([&] { return ++others > 0; });
    EXPECT_EQ(tokensOf(scheduler, conversation).size(), 70U + 2U);
    EXPECT_TRUE(scheduler.forget(conversation)->wait(kForever));
    EXPECT_TRUE(tokensOf(scheduler, conversation).empty());
    second->cancel();
    EXPECT_TRUE(second->wait(kForever));
    EXPECT_FALSE(first->wait(0));
    EXPECT_EQ(others, 0) << "a long task began while another was under way";

    mayEnd = true;
    EXPECT_TRUE(first->wait(kForever));
    EXPECT_TRUE(third->wait(kForever));
    EXPECT_EQ(others, 1);
    EXPECT_GT(pieces, 2);
}

TEST(Conversations, ATaskThatIsCancelledMakesWayForTheNext) {
    const Model model = modelOf(gpuVariants()[0], 512);
    Scheduler scheduler(engineOf(model, engineOptions(512, 64, 4)), longQueue());
    std::atomic<int> pieces{0};
    const auto endless = scheduler.perform([&] {
        ++pieces;
        return false;
    });
    const auto next = scheduler.perform([] { return true; });
    while (pieces == 0) std::this_thread::yield();
    EXPECT_FALSE(next->wait(0.01));
    endless->cancel();
    EXPECT_TRUE(endless->wait(kForever));
    EXPECT_TRUE(next->wait(kForever));
    const int done = pieces;
    EXPECT_TRUE(scheduler.perform([] { return true; })->wait(kForever));
    EXPECT_EQ(pieces, done);
}

// So answers that are being written wait for one piece, and a paused request may go on between two tasks.
TEST(Conversations, ATurnHasOneLongPiece) {
    TaskQueue queue;
    Tasks submitted;
    for (int i = 0; i < 2; ++i) submitted.push_back(std::make_shared<Task>([] { return true; }, Task::Length::Long));
    const Tasks both = submitted;
    queue.take(submitted);
    const auto noRoom = [](const std::exception&) { return false; };
    EXPECT_TRUE(queue.doPieces(noRoom));
    EXPECT_TRUE(both[0]->wait(0));
    EXPECT_FALSE(both[1]->wait(0));
    EXPECT_FALSE(queue.isUnderWay());
    EXPECT_TRUE(queue.doPieces(noRoom));
    EXPECT_TRUE(both[1]->wait(0));
    EXPECT_FALSE(queue.doPieces(noRoom));
}

// A request's end lets go of its constraint after the thread has taken what was submitted, and before it does tasks:
// what is submitted just then comes in the order that it was submitted in.
TEST(Conversations, ATaskDoesNotOvertakeARequest) {
    struct Farewell : Thirds {
        Farewell(int64_t vocab, std::function<void()> said) : Thirds(vocab, 1000, 0), say(std::move(said)) {}
        ~Farewell() override { say(); }
        std::function<void()> say;
    };
    const Model model = modelOf(gpuVariants()[0], 512);
    Scheduler scheduler(engineOf(model, engineOptions(512, 64, 4)), longQueue());
    const int64_t vocab = model.options().vocab;
    Request last = requestOf(randomTokens(70, vocab, 1), 300);
    last.conversation = std::make_shared<Conversation>("");
    std::shared_ptr<Answer> answer;
    std::shared_ptr<Task> forgotten;
    std::atomic<bool> isSubmitted{false};
    Request constrained = requestOf(randomTokens(70, vocab, 2), 400);
    constrained.ahead = 1;  // nobody reads it, so it does not end by itself
    constrained.extras.constraint = std::make_shared<Farewell>(vocab, [&] {
        answer = scheduler.submit(last);
        forgotten = scheduler.forget(last.conversation);
        isSubmitted = true;
    });
    const auto cancelled = scheduler.submit(std::move(constrained));
    cancelled->cancel();
    EXPECT_EQ(wait(*cancelled).ending.finish, Finish::Cancelled);
    while (!isSubmitted) std::this_thread::yield();
    EXPECT_TRUE(forgotten->wait(kForever));
    EXPECT_EQ(wait(*answer).ending.finish, Finish::Cancelled);
}

}  // namespace
