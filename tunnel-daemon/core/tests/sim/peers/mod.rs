//! Simulation of servers that forward dials to each other. Agents move, change their owner and fall silent; servers restart and
//! drain; links between servers are cut, slow or lost, and announcements of keys are late.
//!
//! The real registry, attempts, hedge budget and context of a forwarded dial; the drivers of both sides are abridged. The
//! properties are asserted where they can break, so a failure names the step:
//!
//! 1. Once keys have settled, a dial that has a reachable match succeeds: `settle`.
//! 2. A dial only reaches an agent under the strategy and key that was chosen, and of one owner: `agent_asked`.
//! 3. A holder asks its own agents, so an attempt is forwarded once: `ask_local`.
//! 4. A dial is hedged once: `pick`.
//! 5. A target is asked again only for a hedge, for a silent agent, or if nobody saw the question: `agent_asked`, `attempt_ended`.
//! 6. A peer leaves nothing: `remove_peer`, `forget_peers`.
//! 7. No dial outlives its deadline, but for the margin of the router: `conclude`.

mod dial;
mod forwarded;
mod oracle;
mod settle;
mod world;

pub(crate) use world::{PeerWorld, Seen};
