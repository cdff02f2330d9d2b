//! What became of dials, as numbers that only grow.

/// What became of dials and links since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DialCounts {
    /// Agents asked because the one before was not sent the dial.
    pub retries: u64,
    /// Agents asked beside one that is slow to answer.
    pub hedges: u64,
    /// Agents asked beside, or after, one that is silent.
    pub failovers: u64,
    /// Dials that waited for an agent to come back.
    pub waited: u64,
    /// Links whose agent fell silent.
    pub suspicions: u64,
}
