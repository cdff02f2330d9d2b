//! `adit status`: the state of a process on lines of at most 80 characters.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use super::client::Socket;
use super::model::{
    Capability, LinkStatus, LogStatus, RedirectOthers, RedirectStatus, Role, SearchStatus, Status,
    Verdict,
};
use super::tables::{certificates, name};
use super::text::{age, bytes, clean, clean_middle, has_colours, show, wrapped};
use crate::probes::DRAINING;
use adit_config::StatusOptions;

/// Columns of a line.
const WIDTH: usize = 80;
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
    if options.json {
        show(&format!("{}\n", socket.text("/v1/status")?))?;
    } else {
        show(&table(&socket.ask("/v1/status")?, has_colours()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The state as text. `colours`: alarming lines are red.
#[must_use]
pub fn table(status: &Status, colours: bool) -> String {
    let mut out = String::new();
    let mut line = |name: &str, text: &str| {
        // Clean all text: the process at that path may not be Adit.
        let text = clean(text, usize::MAX);
        for (number, part) in wrapped(&text, WIDTH - 13).iter().enumerate() {
            let name = if number == 0 { name } else { "" };
            let _infallible = writeln!(out, "{name:<12} {part}");
        }
    };
    let uptime = status.uptime_seconds.clamp(0.0, UPTIME_MAX_SECONDS);
    let uptime = age(Duration::from_secs_f64(uptime));
    line(
        status.role.name(),
        &format!(
            "{} version {}, process {}, up {uptime}",
            clean(&status.id, 40),
            clean(&status.version, 20),
            status.pid
        ),
    );
    line(
        "ready",
        &match &status.readiness.reason {
            None if status.readiness.draining => DRAINING.to_owned(),
            None if status.readiness.ready => "yes".to_owned(),
            reason => format!("no: {}", clean(reason.as_deref().unwrap_or("?"), 200)),
        },
    );
    if !status.strategies.is_empty() {
        let each = status.strategies.iter();
        let each = each.map(|strategy| format!("{} {}", strategy.name, strategy.state));
        let all = each.collect::<Vec<_>>().join(", ");
        line("strategies", &clean(&all, 200));
    }
    if let Some(search) = &status.search {
        line("servers", &search_text(search));
    }
    let tunnels = &status.tunnels;
    let encrypted = match tunnels.ktls_lane {
        0 => String::new(),
        count => format!(" ({count} encrypted by the kernel)"),
    };
    let pending = status
        .pending_dials
        .map(|count| format!("; {count} dials pending"))
        .unwrap_or_default();
    line(
        "tunnels",
        &format!(
            "{} open: {} on lanes, {} on raw lanes{encrypted}, {} on links{pending}",
            tunnels.open, tunnels.lane, tunnels.raw_lane, tunnels.link
        ),
    );
    line(
        "moved",
        &format!(
            "{} to targets, {} to clients, by the tunnels open now",
            bytes(tunnels.bytes_to_target),
            bytes(tunnels.bytes_to_client)
        ),
    );
    let lanes = &status.lanes;
    line(
        "lanes",
        &if lanes.limit_per_link == 0 {
            "none: they are switched off by a flag".to_owned()
        } else {
            format!(
                "{} idle, {} busy, {}; at most {} a link, {} in all",
                lanes.idle, lanes.busy, lanes.security, lanes.limit_per_link, lanes.limit
            )
        },
    );
    if status.relay.used {
        line(
            "relay",
            &format!("{}: {}", status.relay.engine, status.relay.reason),
        );
    }
    let limit = status.descriptors.limit;
    line(
        "descriptors",
        &format!(
            "{} of {} in use",
            status.descriptors.in_use,
            limit.map_or_else(|| "any number".to_owned(), |limit| limit.to_string())
        ),
    );
    line(
        "memory",
        &format!(
            "{} of {} held for readers that pause",
            bytes(status.memory.held_bytes),
            bytes(status.memory.budget_bytes)
        ),
    );
    if let Some(held) = &status.privileges {
        line("privileges", &privileges(held));
    }
    if let Some(redirect) = &status.redirect {
        line("redirect", &redirect_text(redirect));
    }
    let account = &status.account;
    if !matches!(account.state.as_str(), "" | "off") {
        let reason = account.reason.as_deref().unwrap_or("?");
        let text = format!("{}: {}", clean(&account.state, 20), clean(reason, 200));
        line("account", &text);
    }
    if let Some(text) = log_text(&status.log) {
        line("log", &text);
    }
    for capability in lacking(&status.capabilities) {
        line(
            capability.verdict.name(),
            &format!("{}: {}", capability.name, capability.text),
        );
    }
    out.push_str(&links(status));
    let certificates = certificates(&status.certificates, true);
    if !certificates.is_empty() {
        out.push('\n');
    }
    for line in certificates {
        let text = line.text;
        let _infallible = if colours && line.is_alarming {
            writeln!(out, "\x1b[1;31m{text}\x1b[0m")
        } else {
            writeln!(out, "{text}")
        };
    }
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

/// Text about the log; `None`: the process is of a release that does not report it.
fn log_text(log: &LogStatus) -> Option<String> {
    if log.level.is_empty() {
        return None;
    }
    let level = clean(&log.level, 200);
    Some(match log.debug_seconds_left {
        None => level,
        Some(left) => format!(
            "{level}, switched on for {} more",
            age(Duration::from_secs(left))
        ),
    })
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

fn lacking(capabilities: &[Capability]) -> impl Iterator<Item = &Capability> {
    capabilities
        .iter()
        .filter(|capability| capability.verdict > Verdict::Ok)
}

fn links(status: &Status) -> String {
    if status.links.is_empty() {
        return "\nno links\n".to_owned();
    }
    let head = match status.role {
        Role::Server => ["PROVED", "AGENT", "ADDRESS"],
        Role::Agent => ["", "SERVER", "ADDRESS"],
    };
    let rest = ["KIND", "STATE", "AGE", "TUNNELS", "LANES"];
    let mut out = format!("\n{}\n", row(status.role, head, rest));
    for link in status.links.iter().take(LINKS_SHOWN) {
        let _infallible = writeln!(out, "{}", link_row(status.role, link));
    }
    let shown = status.links.len().min(LINKS_SHOWN) as u64;
    if status.links_total > shown {
        let _infallible = writeln!(out, "and {} more", status.links_total - shown);
    }
    out
}

fn link_row(role: Role, link: &LinkStatus) -> String {
    let lanes = link.lanes.map_or_else(
        || "-".to_owned(),
        |lanes| format!("{}+{}", lanes.busy, lanes.idle),
    );
    let proved = name(link.principal.as_deref());
    // The ports of agents say little; `adit links` shows them.
    let address = match (role, link.address.parse::<SocketAddr>()) {
        (Role::Server, Ok(address)) => address.ip().to_string(),
        _ => link.address.clone(),
    };
    let rest = [
        &clean(&link.dialect, 4),
        &clean(&link.condition, 8),
        &age(Duration::from_secs(link.age_seconds)),
        &link.tunnels.to_string(),
        &lanes,
    ];
    row(
        role,
        [&proved, &link.peer, &address],
        rest.map(String::as_str),
    )
}

/// A line of the table of links. Only servers know what a peer has proved.
fn row(role: Role, [proved, peer, address]: [&str; 3], rest: [&str; 5]) -> String {
    let [kind, state, age, tunnels, lanes] = rest;
    let first = match role {
        Role::Server => format!(
            "{:<13} {:<11} {:<15}",
            clean_middle(proved, 13),
            clean_middle(peer, 11),
            clean_middle(address, 15)
        ),
        Role::Agent => format!(
            "{:<18} {:<22}",
            clean_middle(peer, 18),
            clean_middle(address, 22)
        ),
    };
    format!("{first} {kind:<4} {state:<8} {age:>6} {tunnels:>7} {lanes:>9}")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::model::{
        API, AccountStatus, Descriptors, DialStatus, LaneStatus, LinkLanes, Memory, Readiness,
        RedirectFile, RedirectNamespaces, RelayStatus, StrategyStatus, TunnelCounts,
    };
    use super::super::tables::tests::certificate;
    use super::*;

    /// A status with the longest values.
    pub(crate) fn status() -> Status {
        let link = LinkStatus {
            link: Some(7),
            identifiers: Some("host=a".to_owned()),
            peer: "agent-\x1b[31m-with-a-very-long-name.example.org".to_owned(),
            address: "[2001:db8:1234:5678:9abc:def0:1234:5678]:65535".to_owned(),
            principal: Some("CN=agent".to_owned()),
            dialect: "adit".to_owned(),
            version: Some("0.1.0".to_owned()),
            age_seconds: 1_051_200,
            condition: "draining".to_owned(),
            tunnels: 9_999_999,
            held_bytes: 0,
            budget_bytes: 64 << 20,
            lanes: Some(LinkLanes {
                idle: 9999,
                busy: 9999,
                wanted: None,
                limit: 9999,
            }),
            dials: Some(DialStatus {
                answered: u64::MAX,
                slow: 1,
                failed: 2,
            }),
        };
        Status {
            api: API,
            role: Role::Server,
            version: "0.1.0".to_owned(),
            id: "s".repeat(100),
            pid: 4_194_304,
            uptime_seconds: 1e9,
            readiness: Readiness {
                ready: false,
                draining: false,
                reason: Some("no connection to any proxy agent".to_owned()),
            },
            strategies: ["destHost", "destCIDR", "defaultRoute", "\x1b[2Jdefault"]
                .map(|name| StrategyStatus {
                    name: name.to_owned(),
                    state: "no agent".to_owned(),
                })
                .into(),
            tunnels: TunnelCounts {
                open: u64::MAX,
                raw_lane: 17,
                ktls_lane: 9,
                ..TunnelCounts::default()
            },
            pending_dials: Some(16_384),
            links: vec![link; 50],
            links_total: 2000,
            search: Some(SearchStatus {
                linked: 3,
                known: 64,
                state: "slow".to_owned(),
                reason: Some("\x1b[2Ja announces 64".repeat(99)),
            }),
            lanes: LaneStatus {
                idle: 99_999,
                busy: 99_999,
                limit_per_link: 1024,
                limit: 349_000,
                security: "plaintext".to_owned(),
            },
            relay: RelayStatus {
                engine: "io-uring".to_owned(),
                reason: "as fast as io_uring in our measurements, with less of the kernel in reach"
                    .to_owned(),
                used: true,
                ..RelayStatus::default()
            },
            capabilities: vec![Capability {
                name: "kernel-tls".to_owned(),
                verdict: Verdict::Missing,
                text: "the kernel was built without it, or its module is not there".to_owned(),
                remedy: None,
            }],
            privileges: Some(vec!["CAP_\x1b[31mDAC_READ_SEARCH".to_owned(); 8]),
            descriptors: Descriptors {
                in_use: 1_048_576,
                limit: None,
            },
            memory: Memory {
                held_bytes: u64::MAX,
                budget_bytes: u64::MAX,
            },
            redirect: Some(RedirectStatus {
                state: "active".to_owned(),
                cgroup: "/sys/fs/cgroup/\x1b[2J".repeat(9),
                part_of_host: true,
                others: Some(RedirectOthers {
                    count: 2,
                    programs: Vec::new(),
                    unknown: Some("names \x1b[2Junknown".repeat(9)),
                }),
                file: Some(RedirectFile {
                    path: "/rules".to_owned(),
                    error: Some("line 1:\n".repeat(99)),
                }),
                namespaces: Some(RedirectNamespaces {
                    reason: Some("it ended".to_owned()),
                    ..RedirectNamespaces::default()
                }),
                ..RedirectStatus::default()
            }),
            account: AccountStatus {
                state: "unavailable".to_owned(),
                reason: Some("it needs \x1b[2JCAP_BPF".repeat(9)),
            },
            log: LogStatus {
                level: "info,\x1b[2Jadit=debug".repeat(9),
                debug_seconds_left: Some(899),
            },
            certificates: vec![
                certificate("/etc/adit/pki/server-cluster.crt", Some(13)),
                certificate("/etc/adit/pki/agents-ca.crt", Some(365)),
            ],
        }
    }

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
