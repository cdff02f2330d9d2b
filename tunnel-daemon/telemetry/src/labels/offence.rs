//! Label values for protocol violations.

use adit_core::wire::packet::Violation;

use super::Label;

label! {
    /// How a peer broke the protocol.
    Offence {
        /// The message is not a packet.
        Malformed = "malformed",
        /// The packet has no payload, or the payload of another packet type.
        PayloadMismatch = "payload_mismatch",
        /// The DATA packet names no connection.
        DataWithoutConn = "data_without_conn",
        /// The message is longer than the protocol allows.
        Oversize = "oversize",
        /// The packet names a dial or tunnel that its link does not have.
        Foreign = "foreign",
        /// A forwarded dial from or to an agent, or a dial of another kind between servers.
        Forward = "forward",
    }
}

impl From<Violation> for Offence {
    fn from(violation: Violation) -> Self {
        match violation {
            Violation::Malformed => Self::Malformed,
            Violation::PayloadMismatch(_) => Self::PayloadMismatch,
            Violation::DataWithoutConn => Self::DataWithoutConn,
            Violation::Oversize(_) => Self::Oversize,
        }
    }
}
