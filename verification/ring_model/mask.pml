/* Grammar masks (R11): bits, checksum, ready word over the queue pair; the scheduler copies what its ready word names.
 * Two requests use one mailbox, one after the other, with two tokens each. Clauses and variants as in ring.pml.
 */
#ifndef TOKENS
#define TOKENS 2
#endif
#define REQS 2
#define VALUE(g, index) (10 * (g) + (index) + 1)   /* the bits of a mask; its checksum is the same number */

bit clause_R11;

mtype = { BITS_A, BITS_B, CHECKSUM, READY };

byte bits_a, bits_b, checksum, ready_generation, ready_index;   /* the ready word is one word: seen whole */
chan qp = [4] of { mtype, byte, byte };
hidden mtype k;
hidden byte x, y;
byte generation = 1, emitted;   /* of the request that runs, as its front end knows from its events */
byte over;

inline deliver(kind, u, v) {
    if
    :: kind == BITS_A -> bits_a = u
    :: kind == BITS_B -> bits_b = u
    :: kind == CHECKSUM -> checksum = u
    :: kind == READY -> ready_generation = u; ready_index = v
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

#ifdef NO_INDEX
#define NAMED (ready_generation == generation)
#else
#ifdef NO_GENERATION
#define NAMED (ready_index == emitted + 1)
#else
#define NAMED (ready_generation == generation && ready_index == emitted + 1)
#endif
#endif

active proctype gpu() {
    byte a, b, c;
    do
    :: over < REQS && NAMED ->
       a = bits_a;
       b = bits_b;
       c = checksum;
       atomic {
           assert(clause_R11 || (a == c && b == c));                      /* else it is counted, and no certificate */
           assert(clause_R11 || a == VALUE(generation, emitted));         /* the mask of this token */
           a = 0; b = 0; c = 0; emitted++;
           if
           :: emitted == TOKENS -> emitted = 0; generation++; over++
           :: else
           fi
       }
    :: over == REQS -> break
    od;
end:
    skip
}

active proctype front_end() {
    byte g = 1, i;
    do
    :: g <= REQS && generation == g && emitted == i ->   /* the token before has been polled */
#ifdef READY_FIRST
       qp!READY, g, i + 1;
#endif
       qp!BITS_A, VALUE(g, i), 0;
       qp!BITS_B, VALUE(g, i), 0;
       qp!CHECKSUM, VALUE(g, i), 0;
#ifndef READY_FIRST
       qp!READY, g, i + 1;
#endif
       i++;
       if
       :: i == TOKENS -> i = 0; g++
       :: else
       fi
    :: g > REQS -> break
    od;
end:
    skip
}

#ifdef PROGRESS
ltl served { <> (over == REQS) }
#endif
