//! Counts of dial outcomes, which only grow.

/// Counts of dial and link outcomes since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DialCounts {
    /// Agents asked because the dial could not be sent to the agent before.
    pub retries: u64,
    /// Agents asked in parallel with an agent that is slow to answer.
    pub hedges: u64,
    /// Agents asked in parallel with a silent agent, or after it.
    pub failovers: u64,
    /// Agents asked after the link of the agent before has ended.
    pub lost: u64,
    /// Dials that waited for an agent to reconnect.
    pub waited: u64,
    /// Links whose agent fell silent.
    pub suspicions: u64,
}
