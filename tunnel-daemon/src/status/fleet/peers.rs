//! Links between servers, as both ends tell of them, and the agents that servers reach through each other.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::super::model::Role;
use super::answer::{Answer, PEERS_MAX};
use super::model::{AgentLink, FleetAgent, FleetPeer, FleetServer, LinkState};

/// Which server asks which.
pub(super) struct PeerLinks<'a> {
    /// Those that are there, and those that should be.
    pub(super) rows: Vec<FleetPeer>,
    /// Askers and holders with a link.
    linked: BTreeSet<(&'a str, &'a str)>,
}

impl<'a> PeerLinks<'a> {
    pub(super) fn of(answers: &'a [Answer]) -> Self {
        let servers = || answers.iter().filter(|answer| answer.role == Role::Server);
        let answered: HashSet<&str> = servers().map(|server| server.id.as_str()).collect();
        let mut links = Self {
            rows: Vec::new(),
            linked: BTreeSet::new(),
        };
        // Servers that have addresses to ask, those that were asked, and those with an address that leads nowhere.
        let (mut asking, mut asked, mut failing) = <[HashSet<&str>; 3]>::default().into();
        for (server, peer) in servers().flat_map(|it| it.peers.iter().map(move |peer| (it, peer))) {
            let (own, other) = (server.id.as_str(), peer.server.as_deref());
            let row = FleetPeer {
                asker: own.to_owned(),
                holder: other.map(str::to_owned),
                address: Some(peer.address.clone()),
                state: peer.state.clone(),
                reason: peer.reason.clone(),
                keys: Some(peer.keys),
                tunnels: peer.tunnels,
            };
            match (peer.direction.as_str(), other) {
                ("from", Some(asker)) => {
                    asked.insert(own);
                    links.linked.insert((asker, own));
                    // Its own answer says more.
                    if !answered.contains(asker) {
                        links.rows.push(FleetPeer {
                            asker: asker.to_owned(),
                            holder: Some(own.to_owned()),
                            keys: None,
                            ..row
                        });
                    }
                }
                ("to", _) if matches!(&*peer.state, "own" | "duplicate") => _ = asking.insert(own),
                ("to", holder) => {
                    asking.insert(own);
                    match holder.filter(|_| row.is_linked()) {
                        Some(holder) => _ = links.linked.insert((own, holder)),
                        None => _ = failing.insert(own),
                    }
                    links.rows.push(row);
                }
                _ => (),
            }
        }
        let staying = servers().filter(|server| !server.readiness.draining);
        let staying: Vec<&str> = staying.map(|server| server.id.as_str()).collect();
        // An address without a link may be that of the very server that has none.
        let askers = staying
            .iter()
            .filter(|id| asking.contains(*id) && !failing.contains(*id));
        let holders = || {
            staying
                .iter()
                .filter(|id| asked.contains(*id))
                .take(PEERS_MAX)
        };
        for asker in askers.take(PEERS_MAX) {
            for holder in holders() {
                if asker != holder && !links.linked.contains(&(*asker, *holder)) {
                    links.rows.push(FleetPeer {
                        asker: (*asker).to_owned(),
                        holder: Some((*holder).to_owned()),
                        state: "missing".to_owned(),
                        ..FleetPeer::default()
                    });
                }
            }
        }
        links
            .rows
            .sort_by(|one, other| (&one.asker, &one.holder).cmp(&(&other.asker, &other.holder)));
        links
    }

    /// Servers with a link between them, by their places in a list.
    pub(super) fn places(&self, servers: &[FleetServer]) -> Vec<(usize, usize)> {
        let ids = servers.iter().map(|server| server.id.as_str());
        let place: HashMap<&str, usize> = ids.zip(0..).collect();
        let places = self.linked.iter();
        let places =
            places.filter_map(|(asker, holder)| Some((*place.get(asker)?, *place.get(holder)?)));
        places.collect()
    }

    /// Servers that the answers of others name.
    pub(super) fn named(&self) -> impl Iterator<Item = &'a str> {
        self.linked
            .iter()
            .flat_map(|(asker, holder)| [*asker, *holder])
    }

    /// Marks which agents servers without a link to them reach through a peer.
    pub(super) fn reach(&self, agents: &mut [FleetAgent], servers: &[FleetServer]) {
        let places = self.places(servers);
        for agent in agents {
            let usable: Vec<bool> = std::iter::zip(&agent.links, servers)
                .map(|(link, server)| link.state.is_usable() && !server.draining)
                .collect();
            for (asker, holder) in &places {
                let link: &mut AgentLink = &mut agent.links[*asker];
                if usable[*holder]
                    && matches!(
                        link.state,
                        LinkState::Missing | LinkState::Unknown | LinkState::Peer
                    )
                {
                    link.state = LinkState::Peer;
                    link.via.push(servers[*holder].id.clone());
                }
            }
        }
    }
}

/// Notes how many links an agent lacks that is reached through peers: it should have as many as they say, or one to each server.
pub(super) fn count_lacking(agents: &mut [FleetAgent], servers: &[FleetServer], links: u64) {
    let accepting = servers.iter().filter(|server| server.wants_agents());
    let expected = links.min(accepting.count() as u64);
    for agent in agents {
        let has =
            |state: fn(LinkState) -> bool| agent.links.iter().filter(move |it| state(it.state));
        let usable = has(LinkState::is_usable).count() as u64;
        if has(|state| state == LinkState::Peer).count() > 0
            && has(|state| state == LinkState::Unknown).count() == 0
        {
            agent.lacking = expected.saturating_sub(usable);
        }
    }
}
