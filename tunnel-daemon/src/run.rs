//! One process from its plan to its exit code: logging, runtime, signals, grace.

use std::ffi::OsString;
use std::future::ready;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime::Builder;
#[cfg(feature = "demo")]
use tracing::Level;

use crate::controls::{Controls, Requests, outlive_requests};
#[cfg(feature = "demo")]
use crate::demo;
use crate::listeners::spelling::{frontends, list, or_off, targets};
use crate::log_options::log_options;
use crate::signals::Signals;
use crate::status::text::show;
use crate::{
    agent, check, ebpf, ebpf_flags, node_interface, pki, proxy, server, service_manager, status,
    top,
};
use adit_config::limits;
#[cfg(feature = "demo")]
use adit_config::plan::LogPlan;
use adit_config::plan::{
    AgentPlan, ClientsPlan, Drain, FrontendListen, FrontendPlan, LogFormat, ProxyPlan, ServerPlan,
    ShutdownPlan,
};
use adit_config::{Command, ConfigError, Parsed};
use adit_host::blocking::{NoThreads, start_runtime};
use adit_host::{memory, privileges};
use adit_net::inherited::InheritedSockets;
use adit_relay::give_back_program_pages;
use adit_telemetry::log;
use adit_telemetry::{COMMIT, LogOptions, VERSION};
use adit_tls::blocks;

#[cfg(feature = "demo")]
/// The demo dials a target that refuses, on purpose, and shows the answer itself.
const DEMO_FILTER: &str = "warn,adit::dial=error";

/// Polls of tasks after which a busy thread checks sockets for events. Tokio's default of 61 assumes short polls: under bulk
/// load each poll takes up to a millisecond, and small requests waited for a fifth of a second. Measured in
/// perf/results/history.md, "Echo beside bulk".
const POLLS_BETWEEN_EVENTS: u32 = 8;

/// When a proxy has started, and its tasks have run once.
const RESTS_AFTER: Duration = Duration::from_secs(2);

/// Runs a parsed command line to its end.
pub fn run(parsed: Parsed) -> ExitCode {
    let Parsed { command, warnings } = parsed;
    let done = match command {
        Command::Server(plan) => {
            begin(ebpf_flags::of_server(&plan));
            let options = log_options(&plan.log);
            let followers = followers_of_server(&plan);
            return serve(&options, followers, &warnings, async |controls| {
                asked_by_signals(controls, run_server(&plan, controls)).await
            });
        }
        Command::Agent(plan) => {
            begin(ebpf_flags::of_agent(&plan));
            let options = log_options(&plan.log);
            let followers = followers_of_agent(&plan);
            return serve(&options, followers, &warnings, async |controls| {
                asked_by_signals(controls, run_agent(&plan, controls)).await
            });
        }
        Command::Proxy(plan) => {
            begin(None);
            let options = log_options(&plan.log);
            // The connection to servers and the resolver have files, too.
            let followers = 2 + followers_of_clients(&plan.clients);
            return serve(&options, followers, &warnings, async |controls| {
                asked_by_signals(controls, run_proxy(&plan, controls)).await
            });
        }
        // Keeps its capabilities: it starts external programs, which need them.
        #[cfg(feature = "demo")]
        Command::Demo(demo) => {
            let options = log_options(&LogPlan {
                level: Level::WARN,
                ..LogPlan::default()
            });
            let options = LogOptions {
                colours: options.colours && !demo.plain,
                filter: options.filter.or_else(|| Some(DEMO_FILTER.to_owned())),
                ..options
            };
            return serve(&options, 0, &warnings, async |_| demo::run(demo).await);
        }
        Command::Check(options) => {
            return check::run(&options).unwrap_or_else(|error| {
                let _degraded = fail(&error);
                ExitCode::from(check::report::MISSING)
            });
        }
        Command::Status(options) if !options.fleet.is_empty() => {
            return answered(status::fleet::of_files(&options.fleet, options.json));
        }
        Command::Status(options) => status::print::run(&options),
        Command::KubectlStatus(options) => return answered(status::fleet::of_pods(&options)),
        Command::Links(options) => status::links::run(&options),
        Command::Top(options) => top::run(&options),
        Command::Pki(options) => pki::run(&options),
        Command::NodeInterface(options) => node_interface::run(&options),
        Command::Man(options) => {
            let written = clap_mangen::generate_to(adit_config::for_users(), &options.dir);
            let written =
                written.with_context(|| format!("cannot write to {}", options.dir.display()));
            written.map(|()| ExitCode::SUCCESS)
        }
        Command::NetnsHelper(options) => {
            let helped = outlive_requests().context("cannot take signals over");
            let helped = helped
                .and_then(|()| ebpf::netns_helper(&options).map_err(|why| anyhow::anyhow!(why)));
            helped.map(|()| ExitCode::SUCCESS)
        }
        Command::Execute { program, args } => {
            let error = std::process::Command::new(&program).args(args).exec();
            let error = anyhow::Error::new(error).context(format!(
                "cannot run {}: put the program whose place Adit takes there",
                program.display()
            ));
            Err(error)
        }
        Command::Print(text) => {
            let shown = show(&text).map_err(anyhow::Error::new);
            shown.map(|()| ExitCode::SUCCESS)
        }
    };
    done.unwrap_or_else(|error| fail(&error))
}

/// Drops capabilities. Those for eBPF are probed only if it is requested: a seccomp profile without bpf(2) may kill the probing
/// process.
fn begin(ebpf_flag: Option<&str>) {
    privileges::begin(ebpf_flag.is_some() && ebpf::maps_need_capability());
}

/// Runs a program that logs, to its end. `followers`: followers of files, for each of which there are threads.
fn serve(
    options: &LogOptions,
    followers: usize,
    warnings: &[String],
    program: impl AsyncFnOnce(&Controls) -> anyhow::Result<ExitCode>,
) -> ExitCode {
    let format = options.format;
    let lines = match log::init(options, privileges::give_up_here) {
        Ok(guard) => Arc::new(guard),
        Err(error) => return fail_as(format, &error.to_string()),
    };
    // The final error message is the last line.
    let fail = |error: &anyhow::Error| {
        lines.flush();
        fail_as(format, &format!("{error:#}"))
    };
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    crate::descriptors::raise_limit();
    let memory = memory::limit();
    if crate::budgets::socket_buffer_kib_max(memory).is_some() {
        blocks::take_none();
    } else {
        blocks::keep_at_most(memory / limits::KEPT_BLOCKS_DIVISOR);
    }
    let mut builder = Builder::new_multi_thread();
    builder
        .event_interval(POLLS_BETWEEN_EVENTS)
        .on_thread_start(privileges::give_up_here);
    let written = Arc::clone(&lines);
    let refused = move |error: &NoThreads| {
        written.flush();
        let _code = fail_as(format, &error.to_string());
        std::process::exit(1);
    };
    let runtime = match start_runtime(&mut builder, followers, refused) {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.into()),
    };
    let inherited = InheritedSockets::from_env()
        .context("a socket that the service manager passed cannot be used");
    let inherited = match inherited {
        Ok(inherited) => inherited,
        Err(error) => return fail(&error),
    };
    let controls = Controls {
        debug: lines.debug_log(),
        inherited,
        ..Controls::default()
    };
    let outcome = runtime.block_on(program(&controls));
    // Tasks that were told to end are not waited for; sockets close with the process.
    runtime.shutdown_background();
    lines.flush();
    outcome.unwrap_or_else(|error| fail(&error))
}

fn followers_of_clients(plan: &ClientsPlan) -> usize {
    let is_tls = |frontend: &&FrontendPlan| {
        matches!(frontend.listen, FrontendListen::Tcp { tls: Some(_), .. })
    };
    let of_frontends = plan.frontends.iter().filter(is_tls).count();
    of_frontends + usize::from(plan.users.is_some())
}

fn followers_of_server(plan: &ServerPlan) -> usize {
    let redirect = plan.transparent.redirect.as_ref();
    let others = [
        plan.agents.deny.is_some(),
        plan.agents.tokens.is_some() || plan.leases.is_some(),
        redirect.is_some_and(|redirect| redirect.file.is_some()),
        !plan.destinations.allowed.is_empty(),
    ];
    // The listener for agents has files, too.
    1 + followers_of_clients(&plan.clients) + others.into_iter().filter(|follows| *follows).count()
}

fn followers_of_agent(plan: &AgentPlan) -> usize {
    let redirect = plan.redirect.as_ref();
    let others = [
        plan.token_path.is_some(),
        plan.leases.is_some(),
        redirect.is_some_and(|redirect| redirect.file.is_some()),
    ];
    // The connection to servers and the resolver have files, too.
    2 + others.into_iter().filter(|follows| *follows).count()
}

/// Starts a server or agent. A signal ends a start that waits, such as for a file: `None`.
///
/// # Errors
/// Why it does not start, or that a socket of the service manager has no listener.
async fn unless_signalled<T>(
    signals: &mut Signals,
    controls: &Controls,
    start: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<Option<T>> {
    let started = tokio::select! {
        started = start => started?,
        () = signals.next() => {
            tracing::info!("signal received during the start: leaving");
            return Ok(None);
        }
    };
    privileges::finish().await;
    // Clients of a passed socket that has no listener would connect and wait forever.
    let left = controls.inherited.left();
    anyhow::ensure!(
        left.is_empty(),
        "the service manager passed sockets at which nothing is to listen: {}; give a --frontend of a server at each, or \
         remove its socket unit",
        left.join(", ")
    );
    Ok(Some(started))
}

/// Prints why a command line is refused, as the last line, in the log format it asks for, as far as it can be parsed.
pub fn refuse(error: &ConfigError, argv: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut behind_flag = false;
    let asks_json = argv.into_iter().any(|arg| {
        let is_json = arg == "--log-format=json" || (behind_flag && arg == "json");
        behind_flag = arg == "--log-format";
        is_json
    });
    let format = if asks_json || error.is_json() {
        LogFormat::Json
    } else {
        LogFormat::Text
    };
    let _code = fail_as(format, error.message());
    ExitCode::from(error.exit_code())
}

/// The exit code of a question about a fleet. A failure leaves the answer open.
fn answered(verdict: anyhow::Result<ExitCode>) -> ExitCode {
    verdict.unwrap_or_else(|error| {
        let _missing = fail(&error);
        ExitCode::from(status::fleet::UNKNOWN)
    })
}

fn fail(error: &anyhow::Error) -> ExitCode {
    fail_as(LogFormat::Text, &format!("{error:#}"))
}

fn fail_as(format: LogFormat, why: &str) -> ExitCode {
    // A closed standard error is no reason to panic: the exit code still reports the failure.
    let _unread = std::io::stderr().write_all(log::fatal(format, why).as_bytes());
    ExitCode::FAILURE
}

/// Runs a program to its end, and serves requests by signal meanwhile.
async fn asked_by_signals(
    controls: &Controls,
    program: impl Future<Output = anyhow::Result<ExitCode>>,
) -> anyhow::Result<ExitCode> {
    let requests = Requests::new().context("cannot take signals over")?;
    tokio::select! {
        ended = program => ended,
        never = requests.serve(controls) => match never {},
    }
}

async fn run_server(plan: &ServerPlan, controls: &Controls) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    let starting = server::start_with(plan, controls);
    let Some(server) = unless_signalled(&mut signals, controls, starting).await? else {
        return Ok(ExitCode::SUCCESS);
    };
    tracing::info!(
        version = VERSION,
        commit = COMMIT,
        id = %plan.server_id,
        agents = or_off(Some(server.agents).filter(|agents| *agents != server::NO_PORT)),
        peers = or_off(server.peers),
        frontends = frontends(&plan.clients.frontends, &server.frontends),
        transparent = server.transparent.map(|address| address.to_string()),
        health = or_off(server.health),
        admin = or_off(server.admin),
        admin_socket = or_off(server.admin_socket().map(Path::display)),
        "server is up"
    );
    service_manager::ready();
    if plan.agents.port.is_none() {
        wait_and_release_startup_code(&mut signals).await;
    } else {
        signals.next().await;
    }
    tracing::info!("signal received: shutting down");
    service_manager::stopping();
    let grace = grace(plan.shutdown);
    let stopped = async {
        server.leave(grace).await;
        server.cut(limits::SHUTDOWN_FLUSH).await;
    };
    // Waits for no client, but each cut tunnel is logged and both of its ends see an abort.
    let at_once = async {
        let cut = server.cut(Duration::ZERO);
        let _stuck = tokio::time::timeout(limits::SHUTDOWN_FLUSH, cut).await;
    };
    Ok(until_second(stopped, at_once, &mut signals, plan.shutdown).await)
}

/// `None`: no limit.
fn grace(plan: ShutdownPlan) -> Option<Duration> {
    match plan.drain {
        Drain::For(grace) => Some(grace),
        Drain::UntilSecondSignal => None,
    }
}

/// Waits for a signal, in a small process beside another one: most of what the start needed is not needed again.
async fn wait_and_release_startup_code(signals: &mut Signals) {
    let rests = async {
        tokio::time::sleep(RESTS_AFTER).await;
        if let Err(error) = give_back_program_pages() {
            tracing::debug!(%error, "the code of the start stays in memory");
        }
        std::future::pending().await
    };
    tokio::select! {
        () = signals.next() => (),
        () = rests => (),
    }
}

async fn run_proxy(plan: &ProxyPlan, controls: &Controls) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    let starting = proxy::start_with(plan, controls);
    let Some(proxy) = unless_signalled(&mut signals, controls, starting).await? else {
        return Ok(ExitCode::SUCCESS);
    };
    tracing::info!(
        version = VERSION,
        commit = COMMIT,
        id = %plan.id,
        servers = list(&plan.servers),
        frontends = frontends(&plan.clients.frontends, &proxy.frontends),
        health = or_off(proxy.health),
        admin_socket = or_off(proxy.admin_socket().map(Path::display)),
        "proxy is up"
    );
    service_manager::ready();
    wait_and_release_startup_code(&mut signals).await;
    tracing::info!("signal received: shutting down");
    service_manager::stopping();
    let stopped = async {
        proxy.leave(grace(plan.shutdown)).await;
        proxy.cut(limits::SHUTDOWN_FLUSH).await;
    };
    let at_once = proxy.cut(Duration::ZERO);
    Ok(until_second(stopped, at_once, &mut signals, plan.shutdown).await)
}

async fn run_agent(plan: &AgentPlan, controls: &Controls) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    let starting = agent::start_with(plan, controls);
    let Some(agent) = unless_signalled(&mut signals, controls, starting).await? else {
        return Ok(ExitCode::SUCCESS);
    };
    tracing::info!(
        version = VERSION,
        commit = COMMIT,
        id = %plan.agent_id,
        servers = list(&plan.servers),
        target_listeners = targets(plan, &agent.target_listeners),
        health = or_off(agent.health),
        admin = or_off(agent.probes.admin()),
        admin_socket = or_off(agent.probes.socket().map(Path::display)),
        "agent started"
    );
    service_manager::ready();
    let up = async {
        let server = agent.first_server().await;
        tracing::info!(id = %plan.agent_id, %server, "agent is up");
        std::future::pending().await
    };
    tokio::select! {
        () = signals.next() => (),
        () = up => (),
    }
    tracing::info!("signal received: draining");
    service_manager::stopping();
    agent.drain();
    let drained = async {
        match plan.shutdown.drain {
            Drain::For(grace) => agent.idle(grace).await,
            Drain::UntilSecondSignal => std::future::pending().await,
        }
    };
    let code = until_second(drained, ready(()), &mut signals, plan.shutdown).await;
    agent.stop().await;
    Ok(code)
}

/// Waits for the end of `work` or the second signal, whichever is first; after the second signal runs `at_once`.
async fn until_second(
    work: impl Future<Output = ()>,
    at_once: impl Future<Output = ()>,
    signals: &mut Signals,
    plan: ShutdownPlan,
) -> ExitCode {
    tokio::select! {
        () = work => ExitCode::SUCCESS,
        () = signals.next() => {
            tracing::warn!("second signal: leaving at once");
            at_once.await;
            ExitCode::from(plan.second_signal_exit_code)
        }
    }
}
