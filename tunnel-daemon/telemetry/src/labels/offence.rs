//! Label values for protocol violations.

use adit_core::wire::packet::Violation;

use super::Label;

label! {
    /// How a peer broke the protocol.
    Offence {
        /// Not a packet.
        Malformed = "malformed",
        /// A packet with the payload of another type, or without one.
        PayloadMismatch = "payload_mismatch",
        /// DATA without a connection.
        DataWithoutConn = "data_without_conn",
        /// A message longer than the protocol allows.
        Oversize = "oversize",
        /// A packet for a dial or tunnel that is not its link's.
        Foreign = "foreign",
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
