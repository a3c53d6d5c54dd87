// The pages of layers that see equally far, shared out among sequences. A sequence's list of pages is indexed by
// position / kPageTokens.
//
// A page that no later token of its sequence sees is given back only when another page is wanted and no page is free of
// what others may want, the one taken longest ago first. Until then the sequence can be rolled back to where its tokens
// are still seen.
//
// Sequences whose texts begin alike can have the same pages there (window_sharing.h: if the layers do not see
// everything). A shared page is full and never written again: a sequence writes only behind the tokens it has.
#pragma once

#include <cstdint>
#include <vector>

#include "core/rules/attention_reach.h"
#include "memory/pages/page_uses.h"

namespace sharpi {

// What a cache has room for.
struct KvRoom {
    // rows and sequences matter only to layers that do not see everything. By default these keep everything too.
    KvRoom(int64_t tokensInAll) : tokens(tokensInAll), rows(tokensInAll) {}
    KvRoom(int64_t tokensInAll, int64_t batchRows, int32_t sequenceCount)
        : tokens(tokensInAll), rows(batchRows), sequences(sequenceCount) {}

    int64_t tokens = 0;     // of all sequences together
    int64_t rows = 0;       // of a batch
    int32_t sequences = 1;  // that hold what their next token sees
};

class PagePool {
public:
    static constexpr int32_t kPageTokens = 64;
    // The last tokens that were computed since a sequence was rolled back can always be rolled back too: up to this
    // many. Wrong drafts need that.
    static constexpr int32_t kRollBackTokens = 64;
    static int64_t pagesFor(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }
    // The pages that layers of this reach need: what `sequences` sequences see and may roll back to, and a batch, but
    // not more than there are tokens.
    static int64_t pagesIn(const KvRoom& room, AttentionReach reach);

    PagePool(AttentionReach reach, int64_t pages, PrefixIndex::Hash hash = PrefixIndex::hash);

    const AttentionReach& reach() const { return _reach; }
    // Its index has the pages that adopt() may find.
    const PageUses& pages() const { return _pages; }
    // Those that no sequence has.
    int64_t freePages() const { return _pages.free(); }
    // The list's entries for pages that were given back name pages of the pool that others may have.
    const int32_t* table(int32_t sequence) const { return at(sequence).table.data(); }
    // Whether the page that holds this position is the sequence's.
    bool holds(int32_t sequence, int64_t position) const;

    // Whether hold() will find the pages. evenKept: it may take pages that keep() protects.
    bool canHold(int32_t sequence, int64_t tokens, bool evenKept) const;
    // Takes the pages that the first `tokens` tokens lack at their end; canHold() must have said yes.
    void hold(int32_t sequence, int64_t tokens);
    // The number of these pages.
    int64_t lacking(int32_t sequence, int64_t tokens) const;
    // Pages that are free, or that no later token of a sequence sees that has them.
    int64_t room(bool evenKept) const;
    // Sequences give back what they no longer see, until this many pages are free of what others may want. If that does
    // not suffice, shared pages that no sequence has are the next to go (pages().evictedBy()), and what keep() protects
    // goes last. There must be room().
    void makeRoom(int64_t pages);
    // The sequence's next token will be at this position, so that it needs no page before what that one sees.
    void settle(int32_t sequence, int64_t tokens);
    // The page of the first token that the one at this position sees.
    int64_t firstPage(int64_t position) const { return _reach.first(static_cast<int32_t>(position)) / kPageTokens; }
    // The most tokens, at most `tokens`, after which the next one finds all the pages it sees.
    int64_t whole(int32_t sequence, int64_t tokens) const;
    // Gives back the pages behind the first `tokens` tokens.
    void cut(int32_t sequence, int64_t tokens);
    // Protects the pages that the token after these sees. Replaces what an earlier call protected; 0 protects nothing.
    void keep(int32_t sequence, int64_t tokens);

    // Shared pages, for layers that see everything.
    //
    // Lets others have the pages that hold this beginning of the sequence's text, but for a page that is not full. If a
    // page with the same tokens is shared already, the sequence has that one from now on. Returns the number of pages
    // up to the last such one; 0 if there is none.
    int64_t share(int32_t sequence, const SaltedText& text);
    // The sequence holds the first `held` tokens of the text. Gives it the shared pages that hold the next ones, in
    // place of a last page that is not full. Returns the number of tokens that it then holds.
    int64_t adopt(int32_t sequence, int64_t held, const SaltedText& text);
    // Pages that are shared now stay with the sequences that have them, and nobody finds them any more.
    void forgetShared();

private:
    friend class WindowSharing;
    struct Sequence {
        std::vector<int32_t> table;
        std::vector<uint64_t> taken;  // [table]: when; later ones have higher numbers; 0: the page was given back
        int64_t begin = 0;            // the position of the next token, or of the batch's first while one is computed
        int64_t kept = 0;             // tokens that keep() was called with
    };
    const Sequence& at(int32_t sequence) const;
    Sequence& at(int32_t sequence);
    template <typename Body> void forUnseen(const Sequence& s, const Body& body) const;
    bool evict(bool evenKept);

    AttentionReach _reach;
    PageUses _pages;
    std::vector<Sequence> _sequences;
    uint64_t _taken = 0;
};

}  // namespace sharpi
