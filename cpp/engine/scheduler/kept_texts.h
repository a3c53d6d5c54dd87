// The texts in the cache that no request works at.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/scheduler/conversation.h"
#include "engine/texts/continuation.h"

namespace sharpi {

// Texts of requests that have ended, for prompts that begin alike, and those of conversations. Their memory is
// whoever's needs it; a conversation then computes its text again. Only the scheduler's thread may use it.
class KeptTexts {
public:
    // Reserves space, so that this many more texts can be kept without an allocation.
    void reserve(size_t texts);
    // Keeps a text of a request that has ended.
    void keep(std::unique_ptr<Continuation> text);
    // Knows this conversation from now on. It may keep its text itself.
    void add(const std::shared_ptr<Conversation>& conversation);
    // This conversation's text is the one that was used last.
    void use(const Conversation& conversation);
    // The text of a request that has ended that holds most of a prompt; nullptr if none holds any of it.
    const Continuation* match(const std::string& salt, const std::vector<int32_t>& prompt) const;
    // Hands a text of a request that has ended out.
    std::unique_ptr<Continuation> take(const Continuation* text);
    // Drops a text of a request that has ended, but not `except`. Returns whether there was one.
    bool dropEnded(const Continuation* except = nullptr);
    // Gives the memory of one text back, that of an ended request first, but not of `except`. Returns whether there was
    // any.
    bool giveWay(const Continuation* except = nullptr);
    // Forgets a conversation and its text.
    void remove(Conversation& conversation);
    void clear();

private:
    std::vector<std::shared_ptr<Conversation>>::iterator find(const Conversation& conversation);

    std::vector<std::unique_ptr<Continuation>> _ended;          // the latest is the last
    std::vector<std::shared_ptr<Conversation>> _conversations;  // the one used last is the last
};

}  // namespace sharpi
