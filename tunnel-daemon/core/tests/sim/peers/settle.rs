//! The end of a world: faults stop, keys settle, and everything that matches is reached.

use std::time::Duration;

use adit_core::ids::{AgentId, LinkId};
use adit_core::target::Host;

use super::dial::Ended;
use super::world::{HOSTS, PeerWorld};

/// Dials after the keys have settled.
const LAST_DIALS: usize = 6;

impl PeerWorld {
    /// Property 1: once keys have settled, a dial that has a reachable match succeeds.
    pub(super) fn settle(&mut self) {
        self.is_calm = true;
        // Every silence ends.
        for _beat in 0..15 {
            self.beat(Duration::from_secs(1));
        }
        self.ends_leaving();
        for server in 0..self.servers.len() {
            for other in 0..self.servers.len() {
                self.connect_peer(server, other);
            }
        }
        for agent in 0..self.agents.len() {
            if self.links.values().all(|link| link.agent != agent) {
                let server = self.rng.length(0..=self.servers.len() - 1);
                self.connect_agent(agent, server);
            }
        }
        // Longer than any deadline, any announcement on its way, and the memory of keys that were lost in silence.
        for _beat in 0..7 {
            self.beat(Duration::from_secs(10));
        }
        assert!(self.active.is_empty(), "a dial never ends");
        assert!(self.forwards.iter().all(|forward| forward.is_over));
        for (at, server) in self.servers.iter().enumerate() {
            let peers = self.peers.values().filter(|link| link.asker == at);
            assert_eq!(server.registry.complete_peers(), peers.count());
        }
        for _dial in 0..LAST_DIALS {
            let server = self.rng.length(0..=self.servers.len() - 1);
            let address = self.host();
            let host = Host::parse(address);
            let expected = self.scope_true(server, &host);
            let Some(dial) = self.dial(server, address) else {
                assert_eq!(expected, None, "{address} has no key at {server}");
                continue;
            };
            self.beat(Duration::from_millis(200));
            let dial = &self.dials[dial];
            assert_eq!(Some(&dial.scope), expected.as_ref());
            let Some(Ended::Open(link)) = dial.ended else {
                panic!("{address} by {:?}: {:?}", dial.scope, dial.ended);
            };
            assert_eq!(dial.tried.len(), 1, "the first attempt opens the tunnel");
            let here = self.links.contains_key(&link);
            // An agent that drains here may stand behind a peer.
            self.seen.settled_at_peer += u64::from(!here);
        }
        self.forget_peers();
    }

    /// Property 6: without peers a server is as it was before it had any.
    fn forget_peers(&mut self) {
        let peers: Vec<LinkId> = self.peers.keys().copied().collect();
        for peer in peers {
            self.remove_peer(peer);
        }
        for at in 0..self.servers.len() {
            let registry = &self.servers[at].registry;
            assert_eq!((registry.peer_keys(), registry.complete_peers()), (0, 0));
            let mut fresh = self.server(at).registry;
            for (id, link) in self.links.iter().filter(|(_, link)| link.server == at) {
                let agent = &self.agents[link.agent];
                let name = AgentId::new(&link.agent.to_string());
                let _standing = fresh.add(*id, name, &agent.identifiers, Some(agent.principal));
            }
            for address in HOSTS {
                let host = Host::parse(address);
                assert_eq!(
                    registry.scope(&host, self.now),
                    fresh.scope(&host, self.now)
                );
            }
        }
    }
}
