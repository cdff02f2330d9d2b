//! Merges answers into a table of agents by servers. A server's answer decides which links it has; the answer of an agent tells
//! of servers that have not answered, and of an agent that no server knows.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::super::model::{API, DialStatus, Role};
use super::super::tables::ends_soon;
use super::answer::{Answer, PeerLink};
use super::model::{
    AgentLink, Fleet, FleetAgent, FleetCertificate, FleetPeer, FleetServer, LinkState, MissingLink,
    Remark, Verdict,
};
use super::peers::{PeerLinks, count_lacking};

/// Most servers without an answer.
const UNANSWERED_MAX: usize = 256;

/// The peers of a process, each with its best link.
type Peers<'a> = HashMap<&'a str, LinkState>;

/// Merges answers. `problems` are about what could not be read.
pub(super) fn merge(answers: Vec<Answer>, mut problems: Vec<Remark>) -> Fleet {
    let mut notes = Vec::new();
    let answers = distinct(answers, &mut problems, &mut notes);
    let peers = PeerLinks::of(&answers);
    let known = Known::of(&answers, &peers);
    let (mut servers, mut agents) = (known.servers(), known.agents());
    peers.reach(&mut agents, &servers);
    let counts_of = answers.iter().filter_map(|answer| answer.server_count);
    let agent_links = counts_of.filter_map(|count| count.agent_links).max();
    count_lacking(&mut agents, &servers, agent_links.unwrap_or(0));
    for (at, server) in servers.iter_mut().enumerate() {
        let count = |is: fn(LinkState) -> bool| {
            let counted = agents.iter().filter(|agent| is(agent.links[at].state));
            counted.count() as u64
        };
        server.agents = count(LinkState::is_usable);
        server.through_peers = count(|state| state == LinkState::Peer);
    }
    let expected = expected_servers(&answers);
    problems.extend(two_installations(&servers, &agents, &peers));
    problems.extend(gaps(&answers, expected, &servers, &agents));
    notes.extend(remarks(&answers, &servers));
    let missing = missing(&agents);
    Fleet {
        api: API,
        verdict: verdict(&missing, &agents, &peers.rows, &problems),
        expected_servers: expected,
        leases: counts(&answers).filter_map(|count| count.1).max(),
        certificates: certificates(&answers),
        servers,
        agents,
        peers: peers.rows,
        missing,
        problems,
        notes,
    }
}

/// Leaves out answers that are not of a server or agent, and further answers of the same process.
fn distinct(
    answers: Vec<Answer>,
    problems: &mut Vec<Remark>,
    notes: &mut Vec<Remark>,
) -> Vec<Answer> {
    let mut first: HashMap<(&str, String), String> = HashMap::new();
    let mut kept = Vec::new();
    for answer in answers {
        if answer.role == Role::Proxy {
            let text = "is the answer of a proxy, which has no links: left out".to_owned();
            notes.push(Remark::new(answer.source, text));
            continue;
        }
        let (role, id) = (answer.role.name(), answer.id.clone());
        if let Some(earlier) = first.get(&(role, id.clone())) {
            let text = format!(
                "is left out: {earlier} is of the {role} {id}, too; give one answer of each process, and each process an id of its \
                 own (--{role}-id)"
            );
            problems.push(Remark::new(answer.source, text));
            continue;
        }
        first.insert((role, id), answer.source.clone());
        kept.push(answer);
    }
    kept
}

/// Servers and agents with and without an answer.
struct Known<'a> {
    servers: BTreeMap<&'a str, Option<&'a Answer>>,
    /// Servers that agents list links to.
    called: HashSet<&'a str>,
    agents: BTreeMap<&'a str, Option<&'a Answer>>,
    /// Peers of those that have answered.
    peers: HashMap<(&'static str, &'a str), Peers<'a>>,
    /// Links of agents, as servers list them.
    links: HashMap<&'a str, Vec<(&'a str, &'a PeerLink)>>,
}

impl<'a> Known<'a> {
    fn of(answers: &'a [Answer], peers: &PeerLinks<'a>) -> Self {
        let mut known = Self {
            servers: peers.named().map(|server| (server, None)).collect(),
            called: HashSet::new(),
            agents: BTreeMap::new(),
            peers: HashMap::new(),
            links: HashMap::new(),
        };
        for answer in answers {
            let id = answer.id.as_str();
            let is_server = answer.role == Role::Server;
            let (own, others) = match is_server {
                true => (&mut known.servers, &mut known.agents),
                false => (&mut known.agents, &mut known.servers),
            };
            own.insert(id, Some(answer));
            let peers = known.peers.entry((answer.role.name(), id)).or_default();
            for link in &answer.links {
                others.entry(&link.peer).or_default();
                let state = LinkState::of(&link.condition);
                let best = peers.entry(&link.peer).or_insert(state);
                *best = state.min(*best);
                if is_server {
                    known.links.entry(&link.peer).or_default().push((id, link));
                } else {
                    known.called.insert(&link.peer);
                }
            }
        }
        known.cut_servers();
        known
    }

    /// Leaves out servers that only others name, beyond a number: an agent can name any.
    fn cut_servers(&mut self) {
        let mut room = UNANSWERED_MAX;
        self.servers.retain(|_id, answer| {
            let stays = answer.is_some() || room > 0;
            room -= usize::from(answer.is_none() && stays);
            stays
        });
    }

    fn servers(&self) -> Vec<FleetServer> {
        let servers = self.servers.iter().map(|(id, answer)| FleetServer {
            id: (*id).to_owned(),
            source: answer.map(|answer| answer.source.clone()),
            version: answer.map(|answer| answer.version.clone()),
            uptime_seconds: answer.and_then(|answer| answer.uptime_seconds),
            ready: answer.map(|answer| answer.readiness.ready),
            draining: answer.is_some_and(|answer| answer.readiness.draining),
            agents: 0,
            through_peers: 0,
            announced: answer.and_then(|answer| Some(answer.server_count?.announced)),
            accepts_agents: match answer.and_then(|answer| answer.server_count) {
                Some(count) => Some(!count.no_agents),
                None => (answer.is_some() || self.called.contains(id)).then_some(true),
            },
        });
        servers.collect()
    }

    fn agents(&self) -> Vec<FleetAgent> {
        let agents = self.agents.iter();
        agents.map(|(id, answer)| self.agent(id, *answer)).collect()
    }

    fn agent(&self, id: &str, answer: Option<&Answer>) -> FleetAgent {
        let listed = self.links.get(id).map(Vec::as_slice).unwrap_or_default();
        let mut principals: Vec<String> = Vec::new();
        for (_, link) in listed {
            principals.extend(link.principal.clone());
        }
        principals.sort();
        principals.dedup();
        let told = listed
            .iter()
            .find_map(|(_, link)| match link.dialect.as_str() {
                "go" => Some("go".to_owned()),
                _ => link.version.clone(),
            });
        let servers = self.servers.keys();
        let links = servers.map(|server| AgentLink {
            server: (*server).to_owned(),
            state: self.state(server, id),
            via: Vec::new(),
        });
        FleetAgent {
            id: id.to_owned(),
            source: answer.map(|answer| answer.source.clone()),
            principals,
            version: answer.map(|answer| answer.version.clone()).or(told),
            dials: dials(listed),
            links: links.collect(),
            lacking: 0,
        }
    }

    fn state(&self, server: &str, agent: &str) -> LinkState {
        let lists = |role, own, peer| {
            let peers: Option<&Peers<'_>> = self.peers.get(&(role, own));
            peers.and_then(|peers| peers.get(peer)).copied()
        };
        let by_server = lists("server", server, agent);
        let by_agent = lists("agent", agent, server);
        let is_whole = |answer: &&Answer| answer.is_whole();
        let of_server = self.servers.get(server).copied().flatten();
        let of_agent = self.agents.get(agent).copied().flatten();
        match (by_server, by_agent) {
            (Some(state), _) => state,
            (None, _) if of_server.is_some_and(|server| server.readiness.draining) => {
                LinkState::ServerDraining
            }
            (None, Some(_)) if of_server.as_ref().is_some_and(is_whole) => LinkState::AgentOnly,
            (None, Some(state)) => state,
            (None, None) => match [of_server, of_agent].iter().flatten().any(is_whole) {
                true => LinkState::Missing,
                false => LinkState::Unknown,
            },
        }
    }
}

/// Dials of an agent over all servers. Each of its links at a server has the dials of them all.
fn dials(links: &[(&str, &PeerLink)]) -> DialStatus {
    let mut counted = HashSet::new();
    let mut sum = DialStatus::default();
    for (server, link) in links {
        let Some(dials) = link.dials.filter(|_| counted.insert(*server)) else {
            continue;
        };
        sum.answered = sum.answered.saturating_add(dials.answered);
        sum.slow = sum.slow.saturating_add(dials.slow);
        sum.failed = sum.failed.saturating_add(dials.failed);
    }
    sum
}

/// Numbers of servers: those expected, and those with a lease.
fn counts(answers: &[Answer]) -> impl Iterator<Item = (u64, Option<u64>)> {
    answers.iter().filter_map(|answer| {
        let by_server = answer
            .server_count
            .map(|count| (count.announced, count.leases));
        by_server.or_else(|| Some((answer.search.as_ref()?.known, None)))
    })
}

fn expected_servers(answers: &[Answer]) -> Option<u64> {
    counts(answers).map(|(expected, _)| expected).max()
}

/// Servers that share no agent and are no peers, and that know of no further server, are of two installations. If they expect more servers, an agent
/// with too few links is the more likely cause.
fn two_installations(
    servers: &[FleetServer],
    agents: &[FleetAgent],
    peers: &PeerLinks<'_>,
) -> Option<Remark> {
    let mut group: Vec<usize> = (0..servers.len()).collect();
    let mut join = |one: usize, other: usize| {
        let (from, to) = (group[other], group[one]);
        for place in group.iter_mut().filter(|place| **place == from) {
            *place = to;
        }
    };
    for (asker, holder) in peers.places(servers) {
        join(asker, holder);
    }
    for agent in agents {
        let linked = std::iter::zip(0.., &agent.links);
        let linked = linked.filter(|(_, link)| link.state.is_usable());
        let mut linked = linked.map(|(at, _)| at);
        let Some(first) = linked.next() else { continue };
        linked.for_each(|other| join(first, other));
    }
    let mut groups: BTreeMap<usize, Vec<&FleetServer>> = BTreeMap::new();
    for (at, server) in servers.iter().enumerate() {
        if server.agents > 0 {
            groups.entry(group[at]).or_default().push(server);
        }
    }
    let mut complete = groups.values().filter(|group| {
        let size = group.len() as u64;
        let mut announced = group.iter().map(|server| server.announced);
        announced.all(|announced| announced.is_some_and(|announced| announced <= size))
    });
    let (one, other) = (complete.next()?.first()?, complete.next()?.first()?);
    Some(Remark::new(
        one.source.clone()?,
        format!(
            "shares no agent with {}, and neither server expects the other: two installations, so merge their answers apart; or \
             --server-count is too small",
            other.source.clone()?
        ),
    ))
}

/// What is missing among the answers.
fn gaps(
    answers: &[Answer],
    expected: Option<u64>,
    servers: &[FleetServer],
    agents: &[FleetAgent],
) -> Vec<Remark> {
    let cut = answers.iter().filter(|answer| !answer.is_whole());
    let mut gaps: Vec<Remark> = cut
        .map(|answer| {
            let (listed, all) = (answer.links.len(), answer.links_total);
            let text = format!("lists {listed} of {all} links");
            Remark::new(answer.source.clone(), text)
        })
        .collect();
    let by = answers.iter().find(|answer| {
        let by_server = answer.server_count.map(|count| count.announced);
        by_server.or_else(|| Some(answer.search.as_ref()?.known)) == expected
    });
    let known = servers
        .iter()
        .filter(|server| server.accepts_agents != Some(false));
    let servers = known.count() as u64;
    if let (Some(expected), Some(by)) = (expected, by)
        && expected > servers
    {
        let text = format!("expects {expected} servers, and {servers} are known");
        gaps.push(Remark::new(by.source.clone(), text));
    }
    if let (Some(first), true) = (answers.first(), agents.is_empty()) {
        let text = "no agent is linked to any server".to_owned();
        gaps.push(Remark::new(first.source.clone(), text));
    }
    gaps
}

/// What explains the table, and leaves nothing open.
fn remarks(answers: &[Answer], servers: &[FleetServer]) -> Vec<Remark> {
    let mut notes = Vec::new();
    for answer in answers {
        let lacks = answer.lacks();
        if !lacks.is_empty() {
            let text = format!(
                "lacks {}: an answer of another release ({})",
                lacks.join(", "),
                answer.version
            );
            notes.push(Remark::new(answer.source.clone(), text));
        }
    }
    let accepting = || servers.iter().filter(|server| server.wants_agents());
    let known = accepting().count() as u64;
    for server in accepting() {
        let (Some(source), Some(announced)) = (&server.source, server.announced) else {
            continue;
        };
        if announced < known {
            let text = format!(
                "announces {announced} of {known} servers, so agents may not look for the others: --server-count, or leases"
            );
            notes.push(Remark::new(source.clone(), text));
        }
    }
    notes
}

fn missing(agents: &[FleetAgent]) -> Vec<MissingLink> {
    let links = agents.iter().flat_map(|agent| {
        let links = agent.links.iter().filter(|link| link.state.is_missing());
        links.map(|link| MissingLink {
            agent: agent.id.clone(),
            server: link.server.clone(),
            state: link.state,
        })
    });
    links.collect()
}

fn verdict(
    missing: &[MissingLink],
    agents: &[FleetAgent],
    peers: &[FleetPeer],
    problems: &[Remark],
) -> Verdict {
    let is_open = agents.iter().any(FleetAgent::is_incomplete) || !problems.is_empty();
    let is_missing = !missing.is_empty()
        || agents.iter().any(|agent| agent.lacking > 0)
        || !peers.iter().all(FleetPeer::is_linked);
    match is_missing {
        true => Verdict::Missing,
        false if is_open || agents.is_empty() => Verdict::Unknown,
        false => Verdict::Linked,
    }
}

/// Certificates that have expired or soon will, the first to expire first.
fn certificates(answers: &[Answer]) -> Vec<FleetCertificate> {
    let all = answers.iter().flat_map(|answer| {
        let certificates = answer.certificates.iter().flatten();
        certificates.map(|certificate| FleetCertificate {
            role: answer.role,
            id: answer.id.clone(),
            certificate: certificate.clone(),
        })
    });
    let mut soon: Vec<FleetCertificate> = all.filter(|one| ends_soon(&one.certificate)).collect();
    soon.sort_by_key(|one| one.certificate.expires);
    soon
}
