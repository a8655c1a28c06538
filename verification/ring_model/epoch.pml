/* A front end takes over a ring whose last one is dead (R2): its request lives, or its step runs, and its words lie about.
 * Clauses and variants as in ring.pml.
 */
#define SQ 2
#define OLD 1
#define NEW 2

bit clause_R2, clause_K4;

mtype = { CLEAR, HEAD, EPOCH, PAYLOAD, ENTRY, EVENT, TAIL, TAKEN, ACK };

/* Written by the NIC. The first submission of the dead one lies in its place still. */
byte sq_seq[SQ] = 1, sq_of[SQ] = OLD, payload = OLD, head_word = 2, epoch_word = OLD;
/* Written by the GPU: the dead one had two events. */
byte event_of = OLD, event_seq = 1, tail_word = 2, tail_of = OLD, ack_word = OLD;

chan qp = [5] of { mtype, byte, byte };       /* kind, place or value, whose */
chan stores = [5] of { mtype, byte, byte };
hidden mtype k;
hidden byte x, y;

bit answered;   /* the new front end has the event of its request */

inline deliver(kind, at, whose) {
    if
    :: kind == CLEAR -> sq_seq[at] = 0
    :: kind == HEAD -> head_word = at
    :: kind == EPOCH -> epoch_word = at
    :: kind == PAYLOAD -> payload = whose
    :: kind == ENTRY -> sq_seq[at] = at + 1; sq_of[at] = whose
    fi
}

active proctype nic() {
#ifdef RELAXED_NIC
    bit held; mtype hk; byte hx, hy;
#endif
end:
    do
    :: d_step { qp?k, x, y; deliver(k, x, y) }
#ifdef RELAXED_NIC
    :: d_step { !held && len(qp) > 0 -> qp?hk, hx, hy; held = 1 }
    :: d_step { held -> deliver(hk, hx, hy); held = 0 }
#endif
    od
}

inline arrive(kind, value, whose) {
    if
    :: kind == EVENT -> event_seq = value; event_of = whose
    :: kind == TAIL -> tail_word = value; tail_of = whose
    :: kind == TAKEN -> skip
    :: kind == ACK -> ack_word = value
    fi
}

#ifdef RELAXED_PUBLISH
#define WAITS(word) (hk == word && stores?[word, _, _])
#else
#define WAITS(word) (stores?[word, _, _])
#endif
active proctype store_buffer() {
    bit held; mtype hk; byte hx, hy;
end:
    do
    :: d_step { !held && len(stores) > 0 -> stores?k, x, y; arrive(k, x, y) }
    :: d_step { held && len(stores) > 0 && !WAITS(TAIL) && !WAITS(TAKEN) && !WAITS(ACK) -> stores?k, x, y; arrive(k, x, y) }
    :: d_step { !held && len(stores) > 0 -> stores?hk, hx, hy; held = 1 }
    :: d_step { held -> arrive(hk, hx, hy); held = 0; hk = 0; hx = 0; hy = 0 }
    od
}

/* The dead one's request holds the page, and while its step runs the step writes into it. */
byte page_owner = OLD, step_owner = OLD, live = OLD;
bit quarantined;
#define IN_FLIGHT (step_owner != 0)

active proctype gpu() {
    byte epoch = OLD, acked = OLD, sq_next = 2, whose, cq_tail;
    do
    :: /* poll */
       if
       :: epoch_word != epoch ->
          atomic {
              epoch = epoch_word; live = 0; sq_next = 0; cq_tail = 0;
              if
              :: page_owner == OLD && IN_FLIGHT -> page_owner = 0; quarantined = 1
              :: page_owner == OLD && !IN_FLIGHT -> page_owner = 0
              :: else
              fi
          }
          stores!TAKEN, 0, epoch;
          stores!TAIL, 0, epoch;
#ifdef ACK_EARLY
          acked = epoch; stores!ACK, epoch, 0
#else
          if
          :: !IN_FLIGHT -> acked = epoch; stores!ACK, epoch, 0
          :: else
          fi
#endif
       :: else ->
          do
          :: sq_next < SQ && sq_seq[sq_next] == sq_next + 1 ->
             whose = sq_of[sq_next];
             assert(clause_R2 || whose == epoch);          /* nobody's word of another epoch is taken */
             live = whose; sq_next++; whose = 0;
             stores!TAKEN, sq_next, epoch
          :: else -> break
          od
       fi;
       /* boundary: commit, then a step for whoever lives and finds a page */
       if
       :: IN_FLIGHT ->
          atomic { whose = step_owner; step_owner = 0; quarantined = 0 }
          if
          :: acked != epoch -> acked = epoch; stores!ACK, epoch, 0
          :: else
          fi;
          if
          :: live == whose && live != 0 ->
             live = 0; page_owner = 0; cq_tail++;
             stores!EVENT, cq_tail, epoch;
             stores!TAIL, cq_tail, epoch
          :: else
          fi;
          whose = 0
       :: !IN_FLIGHT && live != 0 && page_owner != live && page_owner == 0 && !quarantined ->
          page_owner = live; step_owner = live
       :: else
       fi;
       assert(clause_K4 || !IN_FLIGHT || page_owner == step_owner || page_owner == 0)
    od
}

active proctype front_end() {
    byte tail;
#ifdef EPOCH_FIRST
    qp!EPOCH, NEW, 0;
#endif
#ifndef NO_CLEAR
    qp!CLEAR, 0, 0;
    qp!CLEAR, 1, 0;
#endif
    qp!HEAD, 0, 0;
#ifndef EPOCH_FIRST
    qp!EPOCH, NEW, 0;
#endif
#ifndef NO_WAIT
    ack_word == NEW;
    /* requests are over, pages free, and what is read from here on is of this epoch */
    assert(clause_R2 || (live != OLD && step_owner != OLD && page_owner != OLD && !quarantined));
#endif
    qp!PAYLOAD, 0, NEW;
    qp!ENTRY, 0, NEW;
    do
    :: tail_word != 0 ->
       assert(clause_R2 || tail_of == NEW);
       assert(clause_R2 || (event_of == NEW && event_seq == 1));
       answered = 1;
       break
    od;
end:
    skip
}

#ifdef PROGRESS
ltl served { <> answered }
#endif
