/* One ring between a front end and the scheduler (docs/rules.md; docs/ring_model.md says what is modelled).
 *
 * Request r has slot r % SLOTS and generation r / SLOTS + 1, so that r stands for both. An assertion names its clause:
 * `assert(clause_R9 || x)` is the claim x. Variants (verification/ring_model/variants.py) are wrong protocols.
 */
#ifndef SLOTS
#define SLOTS 1         /* other sizes: variants.py */
#define REQS 3
#define SQ 2
#define CQ 2
#endif
#define SEQS (SQ + 1)   /* as 2^24 - 1 and a queue of 2^n: neighbours in a place differ */
#define NONE 255
#ifdef SEQ_OF_PLACE
#define SEQ(index) ((index) % SQ + 1)
#else
#define SEQ(index) ((index) % SEQS + 1)
#endif

/* The clauses by which assertions go; never true. */
bit clause_R3, clause_R4, clause_R6, clause_R8, clause_R9, clause_R10, clause_L1, clause_C1, clause_P3;

mtype = { SUBMIT, CANCEL, PAYLOAD_A, PAYLOAD_B, ENTRY, HEAD, EVENT_A, EVENT_B, TAIL, TAKEN, TOKEN, FINISH, ERROR, CANCELLED };

/* GPU memory that the NIC writes. One message is one word or less: it is seen whole. */
byte sq_seq[SQ], sq_op[SQ], sq_req[SQ], pay_a[SLOTS], pay_b[SLOTS], head_word;
/* Host memory, or memory that the front end READs; the GPU's stores reach it. */
byte ev_seq[CQ], ev_req[CQ], ev_kind[CQ], tail_word, taken_word;

chan qp = [4] of { mtype, byte, byte, byte, byte };  /* writes posted on the queue pair, oldest first */
chan stores = [4] of { mtype, byte, byte, byte };    /* stores of the GPU on their way out */

/* Scratch inside of one atomic step: no part of the state. */
hidden mtype k, k2;
hidden byte at, x, y, z, at2, x2, y2, z2;

/* Ghosts: what really happened, for assertions and progress. */
bit posted[REQS], cancel_sent[REQS], accepted[REQS], ran[REQS], ended[REQS];
byte fe_head, sq_tail, wrote_req[CQ], wrote_kind[CQ];

inline deliver(kind, at, x, y, z) {
    if
    :: kind == PAYLOAD_A -> pay_a[at] = x
    :: kind == PAYLOAD_B -> pay_b[at] = x
    :: kind == ENTRY -> sq_seq[at] = x; sq_op[at] = y; sq_req[at] = z
    :: kind == HEAD -> head_word = x
    fi
}

/* The queue pair delivers in order. With relaxed ordering on the region, later writes may pass one that is held back. */
active proctype nic() {
#ifdef RELAXED_NIC
    bit held; mtype hk; byte hat, hx, hy, hz;
#endif
end:
    do
    :: d_step { qp?k, at, x, y, z; deliver(k, at, x, y, z) }
#ifdef RELAXED_NIC
    :: d_step { !held && len(qp) > 0 -> qp?hk, hat, hx, hy, hz; held = 1 }
    :: d_step { held -> deliver(hk, hat, hx, hy, hz); held = 0; hk = 0; hat = 0; hx = 0; hy = 0; hz = 0 }
#endif
    od
}

inline arrive(kind, at, x, y) {
    if
    :: kind == EVENT_A -> ev_seq[at] = x
    :: kind == EVENT_B -> ev_req[at] = x; ev_kind[at] = y
    :: kind == TAIL -> tail_word = x
    :: kind == TAKEN -> taken_word = x
    fi
}

/* A plain store of the GPU may be held back, so that others pass it; a release store waits for all before it. */
#ifdef RELAXED_PUBLISH
#define WAITS(word) (hk == word && stores?[word, _, _, _])   /* stores to one word stay in order */
#else
#define WAITS(word) (stores?[word, _, _, _])
#endif
active proctype store_buffer() {
    bit held; mtype hk; byte hat, hx, hy;
end:
    do
    :: d_step { !held && len(stores) > 0 -> stores?k, at, x, y; arrive(k, at, x, y) }
    :: d_step { held && len(stores) > 0 && !WAITS(TAIL) && !WAITS(TAKEN) ->
                stores?k, at, x, y; arrive(k, at, x, y) }
    :: d_step { !held && len(stores) > 0 -> stores?hk, hat, hx, hy; held = 1 }
    :: d_step { held -> arrive(hk, hat, hx, hy); held = 0; hk = 0; hat = 0; hx = 0; hy = 0 }
    od
}

/* ---- the scheduler: polls (T4), and between at most two of them a boundary (T3) */

byte live[SLOTS] = NONE, judged[SLOTS] = NONE, row[SLOTS] = NONE;   /* requests; row: of the step in flight */
byte lives, planned, sq_next, cq_tail, cq_head, published;
bit lapsed;
#define UNCONSUMED (cq_tail - cq_head)
#ifdef NO_TERMINAL_CREDIT
#define ROOM_FOR_SUBMIT true
#define ROOM_FOR_TOKEN (UNCONSUMED + planned + 1 <= CQ)
#else
#define ROOM_FOR_SUBMIT (UNCONSUMED + planned + lives + 1 <= CQ)
#define ROOM_FOR_TOKEN (UNCONSUMED + planned + 1 + SLOTS <= CQ)
#endif

inline emit(r, kind) {
    assert(clause_P3 || cq_tail - fe_head < CQ);   /* an event may overwrite only what the front end has read */
    wrote_req[cq_tail % CQ] = r; wrote_kind[cq_tail % CQ] = kind;
    stores!EVENT_A, cq_tail % CQ, cq_tail + 1, 0;
    stores!EVENT_B, cq_tail % CQ, r, kind;
    cq_tail++
}

inline let_go(slot) { live[slot] = NONE; lives-- }

active proctype gpu() {
    byte op, r, slot, a, b, head, polls;
    do
    :: head = head_word;                                  /* credits */
       d_step {
           if
           :: head >= cq_head && head <= published -> cq_head = head
           :: else -> assert(clause_R4 || head == 0)
           fi;
           head = 0
       }
       do                                                 /* entries, until one is not there or is held up (R5) */
       :: atomic {
              if
              :: sq_seq[sq_next % SQ] == SEQ(sq_next) ->
                 op = sq_op[sq_next % SQ]; r = sq_req[sq_next % SQ]; slot = r % SLOTS;
                 assert(clause_R3 || sq_next < sq_tail)   /* it was posted at this index */
              :: else -> break
              fi;
              if
              :: op == SUBMIT && !(ROOM_FOR_SUBMIT) -> break
              :: else
              fi
          }
          if
          :: op == SUBMIT && r == judged[slot] -> skip    /* R6: repeats the newest */
          :: op == SUBMIT && r != judged[slot] ->
             a = pay_a[slot];
             b = pay_b[slot];
             atomic {
                 assert(clause_R8 || (a == r + 1 && b == r + 1));   /* torn: counted, and no certificate */
                 assert(clause_R6 || live[slot] == NONE);
                 assert(clause_R10 || !accepted[r]);
                 accepted[r] = 1; live[slot] = r; judged[slot] = r; lives++; a = 0; b = 0
             }
          :: op == CANCEL && live[slot] == r -> let_go(slot); emit(r, CANCELLED)
          :: op == CANCEL && live[slot] != r -> skip      /* R10: counted */
          fi;
          sq_next++;
          stores!TAKEN, 0, sq_next, 0
       od;
       op = 0; r = 0; slot = 0;
#ifdef LAPSE
       if
       :: !lapsed && lives > 0 ->                         /* L4: the lease has not been renewed for too long */
          lapsed = 1;
          do
          :: slot < SLOTS ->
             if
             :: live[slot] != NONE -> r = live[slot]; let_go(slot);
#ifndef LAPSE_SAYS_NOTHING
                emit(r, ERROR)
#endif
             :: else
             fi;
             slot++
          :: slot == SLOTS -> break
          od
       :: true
       fi;
       r = 0; slot = 0;
#endif
       polls++;
       if
       :: polls < 2                                       /* the step still runs */
       :: true ->
          polls = 0; planned = 0;
          do                                              /* commit: a token each, by which they end */
          :: slot < SLOTS ->
             r = row[slot]; row[slot] = NONE;
#ifdef NO_GENERATION_CHECK
             r = (r == NONE -> NONE : live[slot]);
#endif
             if
             :: r != NONE && live[slot] == r -> let_go(slot); emit(r, TOKEN); emit(r, FINISH)
             :: else                                      /* C1, L5: it ended meanwhile, or another has the slot */
             fi;
             slot++
          :: slot == SLOTS -> break
          od;
          slot = 0; r = 0;
          atomic { do                                     /* plan */
          :: slot < SLOTS ->
             if
             :: live[slot] != NONE && ROOM_FOR_TOKEN -> row[slot] = live[slot]; ran[live[slot]] = 1; planned++
             :: else
             fi;
             slot++
          :: slot == SLOTS -> break
          od }
          slot = 0
       fi;
       if
       :: published != cq_tail -> published = cq_tail; stores!TAIL, 0, cq_tail, 0   /* R9 */
       :: else
       fi
    od
}

/* ---- the front end: submits in order, cancels at will, reads the tail and then the events, gives credits back */

byte next_req, ends;
#define LIVE(r) (r < REQS && posted[r] && !ended[r])

inline read_event() {
    d_step { at = fe_head % CQ; seq = ev_seq[at]; r = ev_req[at]; kind = ev_kind[at] }
}

inline post(op, r) { atomic { qp!ENTRY, sq_tail % SQ, SEQ(sq_tail), op, r; sq_tail++ } }

active proctype front_end() {
    byte tail, r, kind, seq, head;
    do
    :: next_req < REQS && (next_req < SLOTS || ended[next_req - SLOTS]) && SQ - (sq_tail - taken_word) > next_req - ends + 1 ->
       d_step { r = next_req; next_req++; posted[r] = 1 }
#ifdef ENTRY_FIRST
       post(SUBMIT, r);
       qp!PAYLOAD_A, r % SLOTS, r + 1, 0, 0;
       qp!PAYLOAD_B, r % SLOTS, r + 1, 0, 0;
#else
       qp!PAYLOAD_A, r % SLOTS, r + 1, 0, 0;
       qp!PAYLOAD_B, r % SLOTS, r + 1, 0, 0;
       post(SUBMIT, r);
#endif
       r = 0
    :: SQ - (sq_tail - taken_word) >= 1 ->
       if
       :: next_req > 0 && LIVE(next_req - 1) && !cancel_sent[next_req - 1] -> r = next_req - 1
       :: next_req > 1 && LIVE(next_req - 2) && !cancel_sent[next_req - 2] -> r = next_req - 2
       :: else -> goto poll
       fi;
       cancel_sent[r] = 1;
       post(CANCEL, r);
       r = 0
    :: true ->
poll:
#ifdef EVENTS_BEFORE_TAIL
       read_event();   /* posted before the READ of the tail has completed: it may be answered first */
#endif
       tail = tail_word;
#ifdef CREDITS_FIRST
       if
       :: head < tail -> head = tail; qp!HEAD, 0, head, 0, 0
       :: else
       fi;
#endif
       do
       :: fe_head < tail ->
#ifndef EVENTS_BEFORE_TAIL
          read_event();
#endif
          d_step {
              assert(clause_R9 || (seq == fe_head + 1 && r == wrote_req[fe_head % CQ] && kind == wrote_kind[fe_head % CQ]));
              assert(clause_L1 || (r < REQS && accepted[r] && !ended[r]));
              assert(clause_R10 || kind != CANCELLED || cancel_sent[r]);
              assert(clause_C1 || kind != TOKEN || ran[r]);
              if
              :: kind != TOKEN -> ended[r] = 1; ends++
              :: else
              fi;
              fe_head++;
              kind = 0; seq = 0; r = 0
          }
#ifdef EVENTS_BEFORE_TAIL
          ; break
#endif
       :: fe_head >= tail -> break
       od;
       if
       :: head != fe_head -> head = fe_head; qp!HEAD, 0, head, 0, 0
       :: else
       fi
    od
}

/* "Accepted" means published: each request whose entry was posted gets its terminal event (L1). */
#ifdef PROGRESS
ltl served { [] ((posted[0] -> <> ended[0]) && (posted[REQS - 1] -> <> ended[REQS - 1])) }
#endif
