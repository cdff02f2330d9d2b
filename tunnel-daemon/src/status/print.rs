//! `adit status`: the state of a process on lines of at most 80 characters.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use super::client::Socket;
use super::model::{
    AccountStatus, Descriptors, LaneStatus, LinkStatus, LogStatus, PeerStatus, RedirectOthers,
    RedirectStatus, RelayStatus, Role, SearchStatus, Status, TunnelCounts, Verdict,
};
use super::tables::{self, Column, certificates, name};
use super::text::{age, bytes, clean, clean_middle, has_colours, labelled, show};
use crate::probes::DRAINING;
use adit_config::StatusOptions;

/// Columns before a text.
const INDENT: usize = 13;
/// Most links shown; `--json` has more.
const LINKS_SHOWN: usize = 40;
/// Longest uptime shown: no process is up for longer.
const UPTIME_MAX_SECONDS: f64 = 1e10;

/// Queries the process and prints its state.
///
/// # Errors
/// No answer, or standard output is closed.
pub fn run(options: &StatusOptions) -> anyhow::Result<ExitCode> {
    let socket = Socket::of(&options.socket)?;
    let text = match options.json {
        true => format!("{}\n", socket.text("/v1/status")?),
        false => table(&socket.ask("/v1/status")?, has_colours()),
    };
    show(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The state as text. `colours`: alarming lines are red.
#[must_use]
pub fn table(status: &Status, colours: bool) -> String {
    let uptime = status.uptime_seconds.clamp(0.0, UPTIME_MAX_SECONDS);
    let uptime = age(Duration::from_secs_f64(uptime));
    let (id, version) = (clean(&status.id, 40), clean(&status.version, 20));
    let process = format!(
        "{id} version {version}, process {}, up {uptime}",
        status.pid
    );
    let ready = match &status.readiness.reason {
        None if status.readiness.draining => DRAINING.to_owned(),
        None if status.readiness.ready => "yes".to_owned(),
        reason => format!("no: {}", clean(reason.as_deref().unwrap_or("?"), 200)),
    };
    let strategies = status.strategies.iter();
    let strategies = strategies.map(|strategy| format!("{} {}", strategy.name, strategy.state));
    let strategies = strategies.collect::<Vec<_>>().join(", ");
    let (moved, memory) = (&status.tunnels, &status.memory);
    let (target, client) = (bytes(moved.bytes_to_target), bytes(moved.bytes_to_client));
    let (held, budget) = (bytes(memory.held_bytes), bytes(memory.budget_bytes));
    let Descriptors { in_use, limit } = status.descriptors;
    let limit = limit.map_or_else(|| "any number".to_owned(), |limit| limit.to_string());
    let servers = status.search.as_ref().map(search_text);
    let tunnels = tunnels_text(&status.tunnels, status.pending_dials);
    let moved = format!("{target} to targets, {client} to clients, by the tunnels open now");
    let memory = format!("{held} of {budget} held for readers that pause");
    let privileges = status.privileges.as_deref().map(privileges);
    let redirect = status.redirect.as_ref().map(redirect_text);
    let lines = [
        (status.role.name(), process),
        ("ready", ready),
        ("strategies", clean(&strategies, 200)),
        ("servers", servers.unwrap_or_default()),
        ("tunnels", tunnels),
        ("moved", moved),
        ("lanes", lanes_text(&status.lanes)),
        ("relay", relay_text(&status.relay)),
        ("descriptors", format!("{in_use} of {limit} in use")),
        ("memory", memory),
        ("privileges", privileges.unwrap_or_default()),
        ("redirect", redirect.unwrap_or_default()),
        ("account", account_text(&status.account)),
        ("log", log_text(&status.log)),
    ];
    // A line without a text is none. Cleans all text: the process at that path may not be Adit.
    let lines = lines.map(|(name, text)| labelled(name, INDENT, &text));
    let mut out: String = lines.concat();
    let capabilities = status.capabilities.iter();
    for capability in capabilities.filter(|one| one.verdict > Verdict::Ok) {
        let text = format!("{}: {}", capability.name, capability.text);
        out += &labelled(capability.verdict.name(), INDENT, &text);
    }
    for peer in &status.peers {
        out += &labelled("peer", INDENT, &peer_text(peer));
    }
    out += &links(status);
    let certificates = certificates(&status.certificates, true);
    if !certificates.is_empty() {
        out.push('\n');
    }
    out += &tables::painted(&certificates, colours);
    out
}

/// Names of the capabilities, or their number if a line would not hold the names.
fn privileges(held: &[String]) -> String {
    const NAMED_MAX: usize = 8;
    match held.len() {
        0 => "none".to_owned(),
        1..=NAMED_MAX => clean(&held.join(", "), 200),
        many => format!("{many} capabilities"),
    }
}

fn tunnels_text(tunnels: &TunnelCounts, pending_dials: Option<u64>) -> String {
    let encrypted = match tunnels.ktls_lane {
        0 => String::new(),
        count => format!(" ({count} encrypted by the kernel)"),
    };
    let pending = pending_dials.map(|count| format!("; {count} dials pending"));
    format!(
        "{} open: {} on lanes, {} on raw lanes{encrypted}, {} on links{}",
        tunnels.open,
        tunnels.lane,
        tunnels.raw_lane,
        tunnels.link,
        pending.unwrap_or_default()
    )
}

fn lanes_text(lanes: &LaneStatus) -> String {
    let LaneStatus {
        idle,
        busy,
        security,
        limit,
        ..
    } = lanes;
    match lanes.limit_per_link {
        0 => "none: they are switched off by a flag".to_owned(),
        most => {
            format!("{idle} idle, {busy} busy, {security}; at most {most} a link, {limit} in all")
        }
    }
}

fn relay_text(relay: &RelayStatus) -> String {
    match relay.used {
        true => format!("{}: {}", relay.engine, relay.reason),
        false => String::new(),
    }
}

fn account_text(account: &AccountStatus) -> String {
    let reason = account.reason.as_deref().unwrap_or("?");
    match account.state.as_str() {
        "" | "off" => String::new(),
        state => format!("{}: {}", clean(state, 20), clean(reason, 200)),
    }
}

/// Text about another server.
fn peer_text(peer: &PeerStatus) -> String {
    let server = peer.server.as_deref().unwrap_or("a server");
    let (server, address) = (clean(server, 40), clean(&peer.address, 60));
    let state = clean(&peer.state, 20);
    let (direction, keys) = match peer.direction.as_str() {
        "from" => ("asks this one", String::new()),
        _ => ("is asked", format!(", {} keys", peer.keys)),
    };
    match &peer.reason {
        Some(reason) => format!("{address} {state}: {}", clean(reason, 300)),
        None if peer.state == "own" => format!("{address} is this server"),
        None if peer.state == "duplicate" => {
            format!("{address} leads to a server that is linked by another address")
        }
        None => format!(
            "{server} at {address} {direction}, {state}{keys}; {} tunnels, dials: {} opened, {} not there, {} failed",
            peer.tunnels, peer.opened, peer.not_here, peer.failed
        ),
    }
}

/// Text about the log; empty if the process is of a release that does not report it.
fn log_text(log: &LogStatus) -> String {
    let level = clean(&log.level, 200);
    match log.debug_seconds_left {
        None => level,
        Some(left) => {
            let left = age(Duration::from_secs(left));
            format!("{level}, switched on for {left} more")
        }
    }
}

/// Text about the search for servers.
fn search_text(search: &SearchStatus) -> String {
    let linked = format!("{} of {} linked", search.linked, search.known);
    let state = match search.state.as_str() {
        "met" | "draining" => return linked,
        "slow" => "searching rarely",
        _ => "searching",
    };
    let reason = search.reason.as_deref();
    let reason = reason.map_or_else(String::new, |reason| format!(": {}", clean(reason, 400)));
    format!("{linked}; {state}{reason}")
}

fn redirect_text(redirect: &RedirectStatus) -> String {
    if let Some(why) = &redirect.reason {
        return format!("{}: {}", redirect.state, clean(why, 200));
    }
    let mut text = format!(
        "{} rules on {}",
        redirect.rules,
        clean_middle(&redirect.cgroup, 60)
    );
    if redirect.part_of_host {
        text += ", only a part of the host";
    }
    if let Some(others) = redirect.others.as_ref().and_then(RedirectOthers::text) {
        text += &format!("; {}", clean(&others, 200));
    }
    if let Some(file) = &redirect.file {
        text += &match &file.error {
            None => format!("; set {} of their file", redirect.set),
            Some(why) => format!("; the file is broken: {}", clean(why, 200)),
        };
    }
    if let Some(namespaces) = &redirect.namespaces {
        text += &format!(
            "; {} other namespaces captured, {} not",
            namespaces.captured.len(),
            namespaces.failed.len() as u64 + namespaces.over_limit
        );
        if let Some(why) = &namespaces.reason {
            text += &format!(": {}", clean(why, 200));
        }
    }
    text
}

fn links(status: &Status) -> String {
    if status.links.is_empty() {
        return "\nno links\n".to_owned();
    }
    // Only servers know what a peer has proved.
    let texts = match status.role {
        Role::Server => [("PROVED", 13), ("AGENT", 11), ("ADDRESS", 15)],
        Role::Agent | Role::Proxy => [("", 0), ("SERVER", 18), ("ADDRESS", 22)],
    };
    let [proved, peer, address] = texts.map(|(head, width)| Column::text(head, Some(width)));
    let columns = [
        proved,
        peer,
        address,
        Column::text("KIND", Some(4)),
        Column::text("STATE", Some(8)),
        Column::number("AGE", 6),
        Column::number("TUNNELS", 7),
        Column::number("LANES", 9),
    ];
    let listed = status.links.iter().take(LINKS_SHOWN);
    let rows = listed.map(|link| link_cells(status.role, link)).collect();
    let mut out = format!("\n{}\n", tables::table(columns, rows).join("\n"));
    let shown = status.links.len().min(LINKS_SHOWN) as u64;
    if status.links_total > shown {
        let _infallible = writeln!(out, "and {} more", status.links_total - shown);
    }
    out
}

fn link_cells(role: Role, link: &LinkStatus) -> [String; 8] {
    let lanes = link.lanes.map_or_else(
        || "-".to_owned(),
        |lanes| format!("{}+{}", lanes.busy, lanes.idle),
    );
    // The ports of agents say little; `adit links` shows them.
    let address = match (role, link.address.parse::<SocketAddr>()) {
        (Role::Server, Ok(address)) => address.ip().to_string(),
        _ => link.address.clone(),
    };
    [
        name(link.principal.as_deref()),
        link.peer.clone(),
        address,
        link.dialect.clone(),
        link.condition.clone(),
        age(Duration::from_secs(link.age_seconds)),
        link.tunnels.to_string(),
        lanes,
    ]
}

#[cfg(test)]
mod tests {
    use super::super::tests::status;
    use super::super::text::WIDTH;
    use super::*;

    #[test]
    fn control_characters_of_a_hostile_answer_are_removed() {
        let evil = || "\x1b[2J".to_owned();
        let mut status = status();
        (status.version, status.lanes.security) = (evil(), evil());
        (status.relay.engine, status.relay.reason) = (evil(), evil());
        for capability in &mut status.capabilities {
            (capability.name, capability.text) = (evil(), evil());
        }
        let redirect = status.redirect.as_mut().unwrap();
        (redirect.state, redirect.reason) = (evil(), Some(evil()));
        for uptime in [-1.0, f64::MAX] {
            status.uptime_seconds = uptime;
            let text = table(&status, false);
            let drives = text.lines().any(|line| line.contains(char::is_control));
            assert!(!drives, "{text:?}");
        }
    }

    #[test]
    fn lines_fit_the_terminal_and_have_no_control_characters() {
        let text = table(&status(), false);
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line:?}");
            assert!(!line.contains(char::is_control), "{line:?}");
        }
        for part in [
            "no: no connection to any proxy agent",
            "strategies   destHost no agent, destCIDR no agent",
            "missing      kernel-tls: ",
            "17 on raw lanes (9 encrypted",
            "account      unavailable: it needs",
            "hooks:",
            "servers      3 of 64 linked; searching rarely: ",
            "9999+9999",
            "and 1960 more",
            "\nPROVED        AGENT       ADDRESS ",
            "\nagent         agent~e.org 2001:db~34:5678 adit draining ",
            "13 days, renew it",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn only_certificates_that_expire_soon_are_red_and_only_in_colours() {
        let text = table(&status(), true);
        let red: Vec<&str> = text.lines().filter(|line| line.contains('\x1b')).collect();
        let [line] = &red[..] else {
            panic!("{red:?}");
        };
        assert!(line.starts_with("\x1b[1;31m/etc/adit/pki/server-cluster.crt "));
        assert!(line.ends_with("13 days, renew it\x1b[0m"), "{line:?}");
    }

    #[test]
    fn an_agent_shows_the_whole_address_of_its_servers() {
        let mut status = status();
        status.role = Role::Agent;
        status.links.truncate(1);
        status.links[0].address = "192.0.2.100:8091".to_owned();
        let text = table(&status, false);
        assert!(text.contains("192.0.2.100:8091 "), "{text}");
        assert!(!text.contains("PROVED"), "{text}");
        assert!(
            text.lines().all(|line| line.chars().count() <= WIDTH),
            "{text}"
        );
    }

    #[test]
    fn unused_features_have_no_line() {
        let mut status = status();
        status.relay.used = false;
        status.redirect = None;
        status.account = AccountStatus {
            state: "off".to_owned(),
            reason: None,
        };
        status.capabilities[0].verdict = Verdict::Info;
        let text = table(&status, false);
        for name in ["relay ", "redirect ", "account ", "info ", "kernel-tls"] {
            assert!(!text.lines().any(|line| line.starts_with(name)), "{text}");
        }
    }
}
