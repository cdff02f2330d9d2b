//! The merged state as tables for people.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::time::Duration;

use super::super::tables::{Column, TableLine, days_left, name, painted, table_lines};
use super::super::text::{age, clean, labelled};
use super::model::{
    Fleet, FleetAgent, FleetCertificate, FleetPeer, FleetServer, LinkState, Remark, Verdict,
};

/// Columns before a text.
const INDENT: usize = 13;
/// Most rows of a table, and most lines of one kind; `--json` has more.
const ROWS_SHOWN: usize = 40;
/// Longest text about an answer.
const REMARK_MAX: usize = 400;
/// Longest uptime shown: no process is up for longer.
const UPTIME_MAX_SECONDS: f64 = 1e10;

/// What a mark in the table means, for links that are there or may be.
const MARKS: [(LinkState, char, &str); 6] = [
    (LinkState::Serving, '+', "linked"),
    (LinkState::Draining, 'd', "draining"),
    (LinkState::Silent, 's', "silent for some seconds"),
    (LinkState::Peer, 'p', "through a peer"),
    (
        LinkState::ServerDraining,
        '.',
        "not linked to a server that drains",
    ),
    (LinkState::Unknown, '?', "neither end has said"),
];
/// The mark of a missing link.
const MISSING: char = '-';

/// The state as text. `colours`: alarming lines are red.
pub(super) fn table(fleet: &Fleet, colours: bool) -> String {
    let alarm = TableLine {
        text: labelled("verdict", INDENT, &verdict(fleet))
            .trim_end()
            .to_owned(),
        is_alarming: fleet.verdict != Verdict::Linked,
    };
    let mut out = painted(&[alarm], colours);
    out += &labelled("servers", INDENT, &servers_text(fleet));
    out += &labelled("versions", INDENT, &versions(fleet));
    out += &labelled("peers", INDENT, &peers_text(fleet));
    out += &remarks("problem", &fleet.problems);
    out += &remarks("note", &fleet.notes);
    let rows = [
        servers(&fleet.servers),
        peers(&fleet.peers),
        agents(fleet),
        certificates(&fleet.certificates),
    ];
    for lines in rows.iter().filter(|lines| !lines.is_empty()) {
        let _infallible = write!(out, "\n{}", painted(lines, colours));
    }
    let missing = missing(fleet);
    if !missing.is_empty() {
        out.push('\n');
    }
    out + &missing
}

fn verdict(fleet: &Fleet) -> String {
    let links: usize = fleet.agents.iter().map(|agent| agent.links.len()).sum();
    let incomplete = match fleet.problems.is_empty() {
        true => "",
        false => "; answers are missing, too",
    };
    let lacking: u64 = fleet.agents.iter().map(|agent| agent.lacking).sum();
    match fleet.verdict {
        Verdict::Linked => "every server reaches every agent".to_owned(),
        Verdict::Missing => {
            let unlinked = fleet.peers.iter().filter(|peer| !peer.is_linked()).count();
            let missing = fleet.missing.len();
            let parts = [
                (
                    missing as u64,
                    format!("{missing} of {links} links are missing"),
                ),
                (lacking, format!("agents have {lacking} links too few")),
                (
                    unlinked as u64,
                    format!("{unlinked} links between servers are missing"),
                ),
            ];
            let parts = parts.into_iter().filter(|(count, _)| *count > 0);
            let parts: Vec<String> = parts.map(|(_, text)| text).collect();
            parts.join("; ") + incomplete
        }
        Verdict::Unknown => {
            "not known: no link is known to be missing, but an answer is".to_owned()
        }
    }
}

/// Text about links between servers; empty without peers.
fn peers_text(fleet: &Fleet) -> String {
    if fleet.peers.is_empty() {
        return String::new();
    }
    let linked = fleet.peers.iter().filter(|peer| peer.is_linked()).count();
    let through = fleet
        .servers
        .iter()
        .filter(|server| server.through_peers > 0);
    let through = through.take(ROWS_SHOWN).map(|server| {
        let (id, count) = (clean(&server.id, 40), server.through_peers);
        format!("; {id} reaches {count} agents only through peers")
    });
    format!("{linked} of {} links between servers", fleet.peers.len())
        + &through.collect::<String>()
}

fn servers_text(fleet: &Fleet) -> String {
    let answered = fleet
        .servers
        .iter()
        .filter(|server| server.source.is_some());
    let (answered, known) = (answered.count(), fleet.servers.len());
    let expected = match (fleet.expected_servers, fleet.leases) {
        (None, _) => "their number is not known".to_owned(),
        (Some(expected), None) => format!("{expected} expected"),
        (Some(expected), Some(leases)) => format!("{expected} expected, {leases} have a lease"),
    };
    let agents = fleet.agents.len();
    format!("{known} known, {answered} have answered, {expected}; {agents} agents known")
}

/// Releases, each with the number of its processes.
fn versions(fleet: &Fleet) -> String {
    let of = |versions: &mut dyn Iterator<Item = &Option<String>>| {
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        for version in versions {
            *counts
                .entry(version.as_deref().unwrap_or("not known"))
                .or_default() += 1;
        }
        let counts = counts.iter().take(ROWS_SHOWN);
        let counts = counts.map(|(version, count)| format!("{} ({count})", clean(version, 20)));
        counts.collect::<Vec<_>>().join(", ")
    };
    let servers = of(&mut fleet.servers.iter().map(|server| &server.version));
    let agents = of(&mut fleet.agents.iter().map(|agent| &agent.version));
    let parts = [("servers", servers), ("agents", agents)];
    let parts = parts.iter().filter(|(_, text)| !text.is_empty());
    let parts = parts.map(|(what, text)| format!("{what} {text}"));
    parts.collect::<Vec<_>>().join("; ")
}

fn remarks(label: &str, all: &[Remark]) -> String {
    let shown = all.iter().take(ROWS_SHOWN);
    let lines = shown.map(|remark| {
        let text = format!("{}: {}", remark.source, remark.text);
        labelled(label, INDENT, &clean(&text, REMARK_MAX))
    });
    lines.collect::<String>() + &more(all.len()).unwrap_or_default()
}

/// The line about what is not shown.
fn more(all: usize) -> Option<String> {
    let hidden = all.checked_sub(ROWS_SHOWN).filter(|hidden| *hidden > 0)?;
    Some(format!("and {hidden} more\n"))
}

fn servers(all: &[FleetServer]) -> Vec<TableLine> {
    let columns = [
        Column::number("", 3),
        Column::text("SERVER", Some(20)),
        Column::text("VERSION", Some(9)),
        Column::text("READY", Some(9)),
        Column::number("AGENTS", 6),
        Column::number("UP", 6),
        Column::text("ANSWER", Some(21)),
    ];
    let shown = all.iter().take(ROWS_SHOWN);
    let rows = std::iter::zip(1_u64.., shown).map(|(number, server)| {
        let ready = match (server.ready, server.draining) {
            (_, true) => "draining",
            (Some(true), _) => "yes",
            (Some(false), _) => "no",
            (None, _) => "?",
        };
        let up = server
            .uptime_seconds
            .map(|up| up.clamp(0.0, UPTIME_MAX_SECONDS));
        let up = up.map(|up| age(Duration::from_secs_f64(up)));
        [
            number.to_string(),
            server.id.clone(),
            server.version.clone().unwrap_or_else(|| "?".to_owned()),
            ready.to_owned(),
            server.agents.to_string(),
            up.unwrap_or_else(|| "?".to_owned()),
            server.source.clone().unwrap_or_else(|| "none".to_owned()),
        ]
    });
    let alarms = all.iter().map(|server| server.source.is_none());
    let mut lines = table_lines(columns, rows.collect(), alarms);
    lines.extend(more(all.len()).map(|more| TableLine {
        text: more.trim_end().to_owned(),
        is_alarming: false,
    }));
    lines
}

/// Who asks whom.
fn peers(all: &[FleetPeer]) -> Vec<TableLine> {
    let columns = [
        Column::text("SERVER", Some(16)),
        Column::text("ASKS", Some(16)),
        Column::text("STATE", Some(9)),
        Column::number("KEYS", 7),
        Column::number("TUNNELS", 7),
        Column::text("ADDRESS", Some(20)),
    ];
    let shown = &all[..all.len().min(ROWS_SHOWN)];
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".to_owned());
    let rows = shown.iter().map(|peer| {
        [
            peer.asker.clone(),
            or_unknown(&peer.holder),
            peer.state.clone(),
            or_unknown(&peer.keys.map(|keys| keys.to_string())),
            peer.tunnels.to_string(),
            or_unknown(&peer.address),
        ]
    });
    let alarms = shown.iter().map(|peer| peer.state != "linked");
    let mut lines = table_lines(columns, rows.collect(), alarms);
    lines.extend(more(all.len()).map(|more| TableLine {
        text: more.trim_end().to_owned(),
        is_alarming: false,
    }));
    lines
}

/// Agents by servers: those with missing links and failed dials first.
fn agents(fleet: &Fleet) -> Vec<TableLine> {
    let mut all: Vec<&FleetAgent> = fleet.agents.iter().collect();
    all.sort_by_key(|agent| {
        (
            !agent.is_incomplete(),
            std::cmp::Reverse(agent.dials.failed),
        )
    });
    let shown = &all[..all.len().min(ROWS_SHOWN)];
    // The last digit of each server's number.
    let digits = (1..=fleet.servers.len().min(ROWS_SHOWN)).map(|number| (number % 10).to_string());
    let columns = [
        Column::text("AGENT", Some(20)),
        Column::text("PROVED", Some(16)),
        Column::text("VERSION", Some(9)),
        Column::number("FAILED", 7),
        Column::number("SLOW", 7),
        Column::text(digits.collect::<Vec<_>>().join(" "), None),
    ];
    let rows = shown.iter().map(|agent| {
        let links = agent.links.iter().take(ROWS_SHOWN);
        let marks = links.map(|link| mark(link.state).to_string());
        [
            agent.id.clone(),
            name(agent.principals.first().map(String::as_str)),
            agent.version.clone().unwrap_or_else(|| "?".to_owned()),
            agent.dials.failed.to_string(),
            agent.dials.slow.to_string(),
            marks.collect::<Vec<_>>().join(" "),
        ]
    });
    let alarms = shown.iter().map(|agent| agent.is_incomplete());
    let mut lines = table_lines(columns, rows.collect(), alarms);
    if !lines.is_empty() {
        let more = more(all.len()).map(|more| more.trim_end().to_owned());
        lines.extend(
            more.into_iter()
                .chain([legend(shown)])
                .map(|text| TableLine {
                    text,
                    is_alarming: false,
                }),
        );
    }
    lines
}

fn mark(state: LinkState) -> char {
    let mut known = MARKS.iter();
    let known = known.find(|(of, ..)| *of == state);
    known.map_or(MISSING, |(_, mark, _)| *mark)
}

/// The meaning of the marks that are used.
fn legend(shown: &[&FleetAgent]) -> String {
    let links = shown.iter().flat_map(|agent| &agent.links);
    let marks: HashSet<char> = links.map(|link| mark(link.state)).collect();
    let meanings = MARKS.iter().map(|(_, mark, meaning)| (mark, *meaning));
    let meanings = meanings.chain([(&MISSING, "missing")]);
    let used = meanings.filter(|(mark, _)| marks.contains(mark));
    let used = used.map(|(mark, meaning)| format!("{mark} {meaning}"));
    used.collect::<Vec<_>>().join(", ")
}

fn certificates(all: &[FleetCertificate]) -> Vec<TableLine> {
    let columns = [
        Column::text("OF", Some(25)),
        Column::text("CERTIFICATE", Some(33)),
        Column::text("VALID FOR", Some(20)),
    ];
    let shown = all.iter().take(ROWS_SHOWN);
    let rows = shown.map(|one| {
        let of = format!("{} {}", one.role.name(), one.id);
        [
            of,
            one.certificate.file.clone(),
            days_left(&one.certificate),
        ]
    });
    let mut lines = table_lines(columns, rows.collect(), std::iter::repeat(true));
    lines.extend(more(all.len()).map(|more| TableLine {
        text: more.trim_end().to_owned(),
        is_alarming: false,
    }));
    lines
}

/// What is missing, of each kind.
fn missing(fleet: &Fleet) -> String {
    let peers: Vec<&FleetPeer> = fleet
        .peers
        .iter()
        .filter(|peer| !peer.is_linked())
        .collect();
    let of_peers = peers.iter().take(ROWS_SHOWN).map(|peer| {
        let place = peer.holder.as_ref().or(peer.address.as_ref());
        let place = clean(place.map_or("", String::as_str), 60);
        let reason = peer
            .reason
            .as_ref()
            .map(|reason| format!(": {}", clean(reason, 200)));
        let text = format!(
            "server {} has no link to its peer {place}{}",
            clean(&peer.asker, 60),
            reason.unwrap_or_default()
        );
        labelled("missing", INDENT, &text)
    });
    let agents: Vec<&FleetAgent> = fleet
        .agents
        .iter()
        .filter(|agent| agent.lacking > 0)
        .collect();
    let of_agents = agents.iter().take(ROWS_SHOWN).map(|agent| {
        let has = agent
            .links
            .iter()
            .filter(|link| link.state.is_usable())
            .count() as u64;
        let text = format!(
            "agent {} has {has} of {} links: --peer-agent-links",
            clean(&agent.id, 100),
            has + agent.lacking
        );
        labelled("missing", INDENT, &text)
    });
    [
        links_missing(fleet),
        of_agents.collect(),
        more(agents.len()).unwrap_or_default(),
        of_peers.collect(),
        more(peers.len()).unwrap_or_default(),
    ]
    .concat()
}

fn links_missing(fleet: &Fleet) -> String {
    let all = &fleet.missing;
    let asks = |server: &str| fleet.peers.iter().any(|peer| peer.asker == server);
    let shown = all.iter().take(ROWS_SHOWN);
    let lines = shown.map(|link| {
        let (agent, server) = (clean(&link.agent, 100), clean(&link.server, 100));
        let text = match link.state {
            LinkState::Dead | LinkState::Retired | LinkState::Leaving => {
                let state = match link.state {
                    LinkState::Dead => "dead",
                    LinkState::Retired => "retired",
                    _ => "about to end",
                };
                format!("the link of agent {agent} to server {server} is {state}")
            }
            LinkState::Shadowed => format!(
                "server {server} has the id of agent {agent} from another certificate or token"
            ),
            LinkState::AgentOnly => {
                format!("agent {agent} lists a link to server {server}, and the server does not")
            }
            _ if asks(&link.server) => {
                format!("agent {agent} has no link to server {server}, nor to a peer of it")
            }
            _ => format!("agent {agent} has no link to server {server}"),
        };
        labelled("missing", INDENT, &text)
    });
    lines.collect::<String>() + &more(all.len()).unwrap_or_default()
}
