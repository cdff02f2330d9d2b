//! `adit check`: what this host and the given flags allow, what is missing, and the remedy.
//!
//! Probes gather facts; verdicts depend on facts alone, so tests need no particular host.

mod certificates;
mod egress;
mod host;
pub(crate) mod kernel_paths;
mod kubernetes;
pub(crate) mod line;
mod peers;
mod places;
pub(crate) mod report;
mod servers;
mod target_proxies;

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use adit_relay::Preference;

use self::line::{degraded, missing, ok, refused};
use self::report::Report;
use crate::ebpf::check::Host;
use crate::ebpf_flags;
use crate::log_options::log_options;
use crate::status::model::{Capability, Verdict};
use crate::status::text::show;
use adit_config::plan::{AgentPlan, DataPathPlan, LaneSecurity, LogPlan, ServerPlan};
use adit_config::{CheckGiven, CheckOptions};
use adit_telemetry::log;

/// An earlier clock was never set: all releases of this program are newer than 2025-01-01.
const CLOCK_MIN: Duration = Duration::from_secs(1_735_689_600);

/// Runs the checks and prints the report.
///
/// # Errors
/// A failure outside the checks: no runtime, no resolver.
#[expect(
    clippy::disallowed_methods,
    reason = "whether the clock suits the dates of certificates is what is looked at"
)]
pub(super) fn run(options: &CheckOptions) -> anyhow::Result<ExitCode> {
    crate::descriptors::raise_limit();
    let now = SystemTime::now();
    let host = Host::probe_programs();
    let needs = match &options.given {
        CheckGiven::Nothing | CheckGiven::Refused(_) => Needs::default(),
        CheckGiven::Server(plan, _) => Needs::of_server(plan),
        CheckGiven::Agent(plan, _) => Needs::of_agent(plan),
        CheckGiven::Proxy(..) => Needs::default(),
    };
    let mut lines = lines_of(&host, &host::Facts::gather(true), needs);
    lines.push(clock(now));
    match &options.given {
        CheckGiven::Nothing => (),
        CheckGiven::Refused(error) => {
            let remedy = "correct the command line: it would not start like this";
            lines.push(missing(error.message(), remedy).named(CONFIGURATION));
        }
        CheckGiven::Server(plan, warnings) => {
            let engine = plan.agents.data_path.relay_engine;
            lines.extend(started(warnings, &plan.log, engine));
            lines.extend(certificates::of_server(plan, now));
            lines.extend(kubernetes::of_server(plan)?);
            lines.extend(places::of_server(plan));
            lines.extend(kernel_paths::of_server(plan, &host));
            lines.extend(peers::of_server(plan, options.connect)?);
        }
        CheckGiven::Agent(plan, warnings) => {
            let engine = plan.data_path.relay_engine;
            lines.extend(started(warnings, &plan.log, engine));
            lines.extend(certificates::of_agent(plan, now));
            lines.extend(kubernetes::of_agent(plan)?);
            lines.extend(places::of_agent(plan));
            lines.extend(kernel_paths::of_agent(plan, &host));
            if options.connect {
                lines.extend(servers::of_agent(plan)?);
            }
            lines.extend(target_proxies::of_agent(plan, options.connect)?);
        }
        CheckGiven::Proxy(plan, warnings) => {
            lines.extend(configuration(warnings));
            lines.extend(logging(&plan.log));
            lines.extend(certificates::of_proxy(plan, now));
            lines.extend(kubernetes::users(&plan.clients));
            lines.extend(places::of_proxy(plan));
            if options.connect {
                lines.extend(servers::of_proxy(plan)?);
            }
            lines.extend(target_proxies::of_proxy(plan, options.connect)?);
        }
    }
    lines.extend(egress(options, now)?);
    if options.connect && options.egress_config.is_none() && !has_servers(&options.given) {
        let line = degraded(
            "--connect has no effect without the flags of an agent, a proxy, or a server with --peer, or --egress-config",
            "add agent, proxy or server and its flags behind it",
        );
        lines.push(line.named("server"));
    }
    let report = Report::new(lines);
    if options.json {
        show(&format!("{}\n", report.json()?))?;
    } else {
        show(&report.text())?;
    }
    Ok(report.exit_code())
}

/// Lines about kube-apiserver's egress configuration. Behind it, a server's flags say what it is to fit: that server need
/// not run yet, so it is called only with `--connect`.
fn egress(options: &CheckOptions, now: SystemTime) -> anyhow::Result<Vec<Capability>> {
    let Some(path) = &options.egress_config else {
        return Ok(Vec::new());
    };
    let (server, connect) = match &options.given {
        CheckGiven::Server(plan, _) => (Some(&**plan), options.connect),
        CheckGiven::Refused(_) => (None, options.connect),
        CheckGiven::Nothing | CheckGiven::Agent(..) | CheckGiven::Proxy(..) => (None, true),
    };
    egress::of_file(path, server, connect, now)
}

fn has_servers(given: &CheckGiven) -> bool {
    match given {
        CheckGiven::Agent(..) | CheckGiven::Proxy(..) => true,
        CheckGiven::Server(plan, _) => plan.peers.as_ref().is_some_and(|it| !it.peers.is_empty()),
        CheckGiven::Nothing | CheckGiven::Refused(_) => false,
    }
}

/// Needed host features and whether the host allows them, as `adit status` shows them.
pub(super) fn host_lines(needs: Needs) -> Vec<Capability> {
    // The probe of kernel TLS makes a connection, which a redirect may capture: only for a process that uses kernel TLS.
    let facts = host::Facts::gather(needs.kernel_tls);
    let mut lines = lines_of(&Host::probe(), &facts, needs);
    lines.retain(|line| line.verdict != Verdict::Info);
    lines
}

fn lines_of(host: &Host, facts: &host::Facts, needs: Needs) -> Vec<Capability> {
    let mut lines = host::lines(facts, needs);
    lines.push(host.loading().judged(needs.ebpf));
    lines.extend(fips());
    lines
}

/// A line about certified cryptography, in builds that allow no other.
fn fips() -> Option<Capability> {
    cfg!(feature = "fips").then(|| {
        let line = match adit_tls::cipher::is_fips() {
            true => ok("TLS, digests and keys are of the FIPS build of aws-lc"),
            false => missing(
                "TLS would use cryptography outside the FIPS build of aws-lc",
                "build with the feature fips and without other features of rustls",
            ),
        };
        line.named("fips")
    })
}

/// Host features that flags need. Features that no flag needs are reported, but not judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Redirect or accounting.
    ebpf: bool,
    /// Raw lanes.
    relay: bool,
    /// The relay's engine is requested by name.
    io_uring: bool,
    /// Lanes on kernel TLS.
    kernel_tls: bool,
}

impl Needs {
    pub(crate) fn of_server(plan: &ServerPlan) -> Self {
        let ebpf = ebpf_flags::of_server(plan).is_some();
        Self::of(&plan.agents.data_path, ebpf)
    }

    pub(crate) fn of_agent(plan: &AgentPlan) -> Self {
        Self::of(&plan.data_path, ebpf_flags::of_agent(plan).is_some())
    }

    fn of(data_path: &DataPathPlan, ebpf: bool) -> Self {
        let relay = data_path.lanes_max > 0 && data_path.lane_security != LaneSecurity::Tls;
        Self {
            ebpf,
            relay,
            io_uring: data_path.relay_engine == Preference::IoUring,
            kernel_tls: relay && data_path.lane_security == LaneSecurity::Ktls,
        }
    }
}

/// Lines about what every command line has.
fn started(warnings: &[String], log: &LogPlan, engine: Preference) -> Vec<Capability> {
    let mut lines = configuration(warnings);
    lines.extend(logging(log));
    lines.extend(host::relay_engine(engine));
    lines
}

const CONFIGURATION: &str = "configuration";

fn configuration(warnings: &[String]) -> Vec<Capability> {
    if warnings.is_empty() {
        return vec![ok("the flags fit together").named(CONFIGURATION)];
    }
    let lines = warnings
        .iter()
        .map(|warning| degraded(warning, "change or drop the flag it names").named(CONFIGURATION));
    lines.collect()
}

/// Why the log, and therefore the process, would not start; `None` if it would.
fn logging(plan: &LogPlan) -> Option<Capability> {
    let error = log::check(&log_options(plan)).err()?;
    Some(refused(&error, "correct it").named("log"))
}

fn clock(now: SystemTime) -> Capability {
    let line = match now.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) if since >= CLOCK_MIN => {
            ok("later than this program; certificates are judged by it")
        }
        _ => missing(
            "this host's clock is before 2025: no certificate of today is valid for it",
            "set the clock; run a time service",
        ),
    };
    line.named("clock")
}

#[cfg(test)]
mod tests {
    use super::*;
    use adit_config::plan::LogDestination;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the clock is what is looked at")]
    fn an_unset_clock_is_reported() {
        assert_eq!(clock(SystemTime::UNIX_EPOCH).verdict, Verdict::Missing);
        assert_eq!(clock(SystemTime::now()).verdict, Verdict::Ok);
    }

    #[test]
    fn an_unwritable_log_is_reported() {
        let file = |path: &str| LogPlan {
            destination: LogDestination::File {
                path: path.into(),
                bytes_max: None,
                also_stderr: None,
            },
            ..LogPlan::default()
        };
        let line = logging(&file("/nonexistent/adit.log")).unwrap();
        assert_eq!(line.verdict, Verdict::Missing);
        assert!(line.text.contains("/nonexistent/adit.log"), "{line:?}");
        assert!(line.remedy.is_some_and(|to_do| to_do.contains("folder")));
    }

    fn data_path(lane_security: LaneSecurity, relay_engine: Preference) -> DataPathPlan {
        DataPathPlan {
            lanes_max: 4,
            lane_security,
            relay_engine,
        }
    }

    #[test]
    fn needs_follow_from_the_flags() {
        let tls = data_path(LaneSecurity::Tls, Preference::Auto);
        assert_eq!(Needs::of(&tls, false), Needs::default());
        assert!(Needs::of(&tls, true).ebpf);
        let plaintext = data_path(LaneSecurity::Plaintext, Preference::IoUring);
        let needs = Needs::of(&plaintext, false);
        assert!(needs.relay && needs.io_uring && !needs.kernel_tls);
        let ktls = data_path(LaneSecurity::Ktls, Preference::Auto);
        let needs = Needs::of(&ktls, false);
        assert!(needs.relay && needs.kernel_tls && !needs.io_uring);
        let bare = DataPathPlan {
            lanes_max: 0,
            ..ktls
        };
        assert_eq!(Needs::of(&bare, false), Needs::default());
    }

    #[test]
    fn each_warning_is_a_line() {
        let lines = configuration(&["one".to_owned(), "two".to_owned()]);
        assert!(lines.len() == 2 && lines.iter().all(|line| line.verdict == Verdict::Degraded));
        assert_eq!(configuration(&[])[0].verdict, Verdict::Ok);
    }
}
