/* A queue pair fails (design section 3): the same front end rewrites every word that was not acknowledged, at its old index,
 * over a spare one, and no request is lost or made twice. One slot; clauses and variants as in ring.pml.
 */
#define REQS 3
#define SQ 2
#define SEQ(index) ((index) % (SQ + 1) + 1)
#define NONE 255

bit clause_R3, clause_R8, clause_R10, clause_L1;

mtype = { PAYLOAD_A, PAYLOAD_B, ENTRY };

byte sq_index[SQ] = NONE, sq_req[SQ], pay_a, pay_b;   /* sq_index: as its sequence number tells it, for SQ + 1 laps */
byte newest[SQ] = NONE;                               /* ghost: the latest index posted at a place */
chan qp = [4] of { mtype, byte, byte };
chan spare = [4] of { mtype, byte, byte };
bit failed, drained;

byte taken_word, ended, accepted_count[REQS];
hidden mtype k;
hidden byte x, y;

inline deliver(kind, index, r) {
    if
    :: kind == PAYLOAD_A -> pay_a = r + 1
    :: kind == PAYLOAD_B -> pay_b = r + 1
    :: kind == ENTRY ->
       assert(clause_R3 || sq_index[index % SQ] == NONE || sq_index[index % SQ] <= index);   /* none goes back */
       sq_index[index % SQ] = index; sq_req[index % SQ] = r
    fi
}

/* What was posted before the failure arrives in part: the rest is flushed, in order, before the error completes. */
active proctype nic() {
end:
    do
    :: d_step { !failed && len(qp) > 0 -> qp?k, x, y; deliver(k, x, y) }
    :: atomic { !failed -> failed = 1 }
#ifdef LATE_WRITES
    :: d_step { failed && len(qp) > 0 -> qp?k, x, y; deliver(k, x, y) }
#endif
    :: d_step { failed && len(qp) > 0 -> qp?k, x, y }
    :: d_step { failed && len(qp) == 0 && !drained -> drained = 1 }
    :: d_step { spare?k, x, y; deliver(k, x, y) }
    od
}

active proctype gpu() {
    byte live = NONE, judged = NONE, sq_next, r, a, b;
end:
    do
    :: atomic { sq_index[sq_next % SQ] != NONE && SEQ(sq_index[sq_next % SQ]) == SEQ(sq_next) -> r = sq_req[sq_next % SQ] }
       if
       :: r == judged                                     /* R6: ignored */
       :: else ->
          a = pay_a;
          b = pay_b;
          atomic {
              assert(clause_R8 || (a == r + 1 && b == r + 1));
              assert(clause_R10 || accepted_count[r] == 0);
              accepted_count[r]++; judged = r; live = r; a = 0; b = 0
          }
       fi;
       sq_next++; r = 0;
       taken_word = sq_next
    :: live != NONE -> atomic { assert(clause_L1 || live == ended); live = NONE; ended++ }
    od
}

/* Words posted are known until the engine's count of those taken has passed them. */
inline post(r, index) {
    if
    :: !failed || !recovered -> qp!PAYLOAD_A, index, r; qp!PAYLOAD_B, index, r; qp!ENTRY, index, r
    :: else -> spare!PAYLOAD_A, index, r; spare!PAYLOAD_B, index, r; spare!ENTRY, index, r
    fi
}

byte next_req;

active proctype front_end() {
    byte sq_tail, at;
    byte word_of[SQ];     /* request by place */
    bit recovered;
    do
    :: next_req < REQS && ended == next_req && sq_tail - taken_word < SQ ->
       word_of[sq_tail % SQ] = next_req;
       post(next_req, sq_tail);
       sq_tail++; next_req++
#ifdef LATE_WRITES   /* the spare one is used before all of the failed one is flushed */
    :: failed && !recovered ->
#else
    :: failed && drained && !recovered ->
#endif
       recovered = 1;
#ifndef NO_REWRITE
       at = taken_word;
       do
       :: at < sq_tail ->
#ifndef ENTRY_ONLY
          spare!PAYLOAD_A, at, word_of[at % SQ];
          spare!PAYLOAD_B, at, word_of[at % SQ];
#endif
#ifdef AT_THE_TAIL
          spare!ENTRY, sq_tail, word_of[at % SQ];
          word_of[sq_tail % SQ] = word_of[at % SQ]; sq_tail++;
          break
#else
          spare!ENTRY, at, word_of[at % SQ];
          at++
#endif
       :: at >= sq_tail -> break
       od;
       at = 0
#endif
    :: ended == REQS -> break
    od;
end:
    skip
}

#ifdef PROGRESS
ltl served { <> (ended == REQS) }
#endif
