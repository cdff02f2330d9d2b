//! Identifiers. Distinct types keep ids of different kinds from being compared.

use std::fmt;
use std::sync::Arc;

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Wraps the text as it is; no validation.
            #[must_use]
            pub fn new(text: &str) -> Self {
                Self(Arc::from(text))
            }

            /// The text as received or configured.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    };
}

text_id!(
    /// An agent's id: from a flag, the environment or random; the same for every server.
    AgentId
);
text_id!(
    /// A server's id, returned to agents in the `serverid` header.
    ServerId
);

/// Connection id chosen by an agent: unique only on its link, so never a map key alone. 0 is "none".
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ConnId(pub i64);

/// The `random` of a dial: chosen by the dialling side, non-negative 63 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DialId(pub i64);

/// Identifies one live link in this process; never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LinkId(pub u64);

/// Identifies one tunnel of a link. A reused slot gets a new generation, hence a new key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TunnelKey {
    /// Index in the link's table.
    pub slot: u32,
    /// How often the slot had been used before.
    pub generation: u32,
}
