//! What the identifiers of all agents may take.

use std::sync::Arc;

use adit_core::wire::metadata::AgentHello;

use super::admission::Refused;
use crate::net::grpc::Code;
use crate::net::source_quota::{Source, SourcePlaces, SourceQuota};
use crate::telemetry::labels::AgentRefusal;

/// Identifiers of a link that count for nothing, bytes: those of nearly all agents.
const SMALL_BYTES: usize = 4 * 1024;
/// What all others may have together, bytes. The registry has some times as much memory for them.
const LARGE_BYTES_MAX: usize = 64 << 20;

/// The identifiers of agents that have many, shared by their sources of trust.
pub(super) struct IdentifierMemory(Arc<SourceQuota>);

impl Default for IdentifierMemory {
    fn default() -> Self {
        Self(SourceQuota::new(LARGE_BYTES_MAX))
    }
}

impl IdentifierMemory {
    /// Room for the identifiers of a link, for as long as it lives.
    ///
    /// # Errors
    /// There are too many, together with those of others.
    pub(super) fn enter(
        &self,
        hello: &AgentHello,
        source: &Source,
    ) -> Result<Option<SourcePlaces>, Refused> {
        let identifiers = &hello.identifiers;
        let lists = [
            &identifiers.host,
            &identifiers.ipv4,
            &identifiers.ipv6,
            &identifiers.cidr,
        ];
        let bytes = lists.into_iter().flatten().map(String::len).sum();
        if bytes <= SMALL_BYTES {
            return Ok(None);
        }
        self.0.take(source, bytes).map(Some).ok_or_else(|| Refused {
            reason: AgentRefusal::Process,
            code: Code::ResourceExhausted,
            text: format!(
                "{bytes} bytes of identifiers are too many beside those of other links: give each agent those of its own node"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use adit_core::ids::AgentId;
    use adit_core::wire::identifiers::Identifiers;
    use adit_core::wire::metadata::Extensions;

    use super::*;
    use crate::net::stream::PeerAddr;

    #[test]
    fn identifiers_of_many_links_of_one_source_are_bounded_together() {
        let memory = IdentifierMemory::default();
        let hello = |count: usize| AgentHello {
            agent: AgentId::new("a"),
            identifiers: Identifiers {
                host: vec!["h".repeat(256); count],
                ..Identifiers::default()
            },
            extensions: Extensions::default(),
        };
        let [one, other] = ["one", "other"].map(|owner| Source::new(&owner.into(), PeerAddr::Unix));
        let large = hello(1024);
        let held: Vec<_> = std::iter::from_fn(|| memory.enter(&large, &one).ok()).collect();
        assert_eq!(held.len(), 192, "48 MiB");
        assert!(
            memory
                .enter(&large, &other)
                .is_ok_and(|places| places.is_some())
        );
        assert!(
            memory
                .enter(&hello(16), &one)
                .is_ok_and(|places| places.is_none())
        );
        let refused = memory.enter(&large, &one).expect_err("it is refused");
        assert!(refused.text.starts_with("262144 bytes"), "{}", refused.text);
        drop(held);
        assert!(memory.enter(&large, &one).is_ok());
    }
}
