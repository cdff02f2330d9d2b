//! The number of servers that a server announces to agents.

use tokio::sync::watch;

use super::model::ServerCount;

/// What the number is made of.
pub(crate) struct Announced {
    /// By flag.
    pub(crate) configured: i64,
    /// Servers with a lease; 0 without leases.
    pub(crate) leases: watch::Receiver<usize>,
    /// By flag, with peers.
    pub(crate) agent_links: Option<u64>,
    /// False with `--no-agents`.
    pub(crate) accepts_agents: bool,
}

impl Announced {
    pub(super) fn count(&self) -> ServerCount {
        let leases = *self.leases.borrow() as u64;
        let configured = u64::try_from(self.configured).unwrap_or(0);
        ServerCount {
            announced: configured.max(leases),
            leases: (leases > 0).then_some(leases),
            agent_links: self.agent_links,
            no_agents: !self.accepts_agents,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_count_as_far_as_they_are_more_than_the_flag_says() {
        let (sender, leases) = watch::channel(0);
        let configured = 2;
        let announced = Announced {
            configured,
            leases,
            agent_links: Some(2),
            accepts_agents: true,
        };
        for (leases, count, known) in [(0, 2, None), (1, 2, Some(1)), (3, 3, Some(3))] {
            sender.send_replace(leases);
            let expected = ServerCount {
                announced: count,
                leases: known,
                agent_links: Some(2),
                no_agents: false,
            };
            assert_eq!(announced.count(), expected);
        }
    }
}
