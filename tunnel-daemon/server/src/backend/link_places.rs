//! Limits that the links of all agents share, by trust source.

use std::sync::Arc;

use adit_core::wire::metadata::AgentHello;

use crate::backend::admission::Refused;
use adit_net::grpc::Code;
use adit_net::source_quota::{Source, SourcePlaces, SourceQuota};
use adit_telemetry::labels::AgentRefusal;

/// Links of all agents. One source, such as all agents behind one address with one certificate, has at least 37,500.
const LINKS_MAX: usize = 50_000;
/// Identifiers of a link that are not counted, bytes: those of nearly all agents.
const SMALL_BYTES: usize = 4 * 1024;
/// Larger identifiers of all links together, bytes. The registry takes some times as much memory for them.
const LARGE_BYTES_MAX: usize = 64 << 20;

/// Limits on links, and on memory for the identifiers of agents that have many.
pub(super) struct LinkQuota {
    links: Arc<SourceQuota>,
    large: Arc<SourceQuota>,
}

/// One link's share of both limits, released when dropped.
#[derive(Debug)]
pub(super) struct LinkPlaces {
    _link: SourcePlaces,
    _large: Option<SourcePlaces>,
}

impl Default for LinkQuota {
    fn default() -> Self {
        Self::with_links_max(LINKS_MAX)
    }
}

impl LinkQuota {
    fn with_links_max(links_max: usize) -> Self {
        Self {
            links: SourceQuota::new(links_max),
            large: SourceQuota::new(LARGE_BYTES_MAX),
        }
    }

    /// Reserves a link.
    ///
    /// # Errors
    /// There are too many links, or too many bytes of identifiers, together with those of other agents.
    pub(super) fn enter(&self, hello: &AgentHello, source: &Source) -> Result<LinkPlaces, Refused> {
        let Some(link) = self.links.take(source, 1) else {
            return Err(refused(format!(
                "too many links: this server has room for {} links, and keeps some of it for other agents",
                self.links.most()
            )));
        };
        Ok(LinkPlaces {
            _link: link,
            _large: self.identifiers(hello, source)?,
        })
    }

    fn identifiers(
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
        self.large.take(source, bytes).map(Some).ok_or_else(|| {
            refused(format!(
                "{bytes} bytes of identifiers are too many beside those of other links: give each agent those of its own node"
            ))
        })
    }
}

fn refused(text: String) -> Refused {
    Refused::new(AgentRefusal::Process, Code::ResourceExhausted, text)
}

#[cfg(test)]
mod tests {
    use adit_core::ids::AgentId;
    use adit_core::wire::identifiers::Identifiers;
    use adit_core::wire::metadata::{Extensions, PeerVersion};

    use super::*;
    use adit_tls::stream::PeerAddr;

    /// Limit (peers): Links of one trust source | 64 per agent id; 50,000 per process, shared fairly by trust sources
    #[test]
    fn links_of_one_source_leave_room_for_others() {
        let quota = LinkQuota::with_links_max(8);
        let small = AgentHello {
            agent: AgentId::new("a"),
            identifiers: Identifiers::default(),
            extensions: Extensions::default(),
            version: PeerVersion::default(),
            peer: None,
            zone: None,
        };
        let [one, other] = ["one", "other"].map(|owner| Source::new(&owner.into(), PeerAddr::Unix));
        let held: Vec<_> = std::iter::from_fn(|| quota.enter(&small, &one).ok()).collect();
        assert_eq!(held.len(), 6);
        assert!(quota.enter(&small, &other).is_ok());
        let refused = quota.enter(&small, &one).expect_err("it is refused");
        assert!(
            refused
                .text
                .starts_with("too many links: this server has room for 8 links"),
            "{}",
            refused.text
        );
    }

    /// Limit (memory): Identifiers of all links | 4 KiB per link, and 64 MiB beyond that per process, shared fairly by
    /// trust sources
    #[test]
    fn identifiers_of_many_links_of_one_source_are_bounded_together() {
        let quota = LinkQuota::default();
        let hello = |count: usize| AgentHello {
            agent: AgentId::new("a"),
            identifiers: Identifiers {
                host: vec!["h".repeat(256); count],
                ..Identifiers::default()
            },
            extensions: Extensions::default(),
            version: PeerVersion::default(),
            peer: None,
            zone: None,
        };
        let [one, other] = ["one", "other"].map(|owner| Source::new(&owner.into(), PeerAddr::Unix));
        let large = hello(1024);
        let held: Vec<_> = std::iter::from_fn(|| quota.enter(&large, &one).ok()).collect();
        assert_eq!(held.len(), 192, "48 MiB");
        assert!(
            quota
                .enter(&large, &other)
                .is_ok_and(|places| places._large.is_some())
        );
        assert!(
            quota
                .enter(&hello(16), &one)
                .is_ok_and(|places| places._large.is_none())
        );
        let refused = quota.enter(&large, &one).expect_err("it is refused");
        assert!(refused.text.starts_with("262144 bytes"), "{}", refused.text);
        drop(held);
        assert!(quota.enter(&large, &one).is_ok());
    }
}
