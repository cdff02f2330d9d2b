//! `adit demo`: a whole installation in one process, driven and checked, with commands to try by hand.

mod captured;
mod captured_cgroup;
mod checks;
mod counters;
mod folder;
mod frontend;
pub mod grpc_client;
pub mod grpc_io;
mod guide;
pub mod http_client;
mod isolation;
mod live;
mod screen;
mod stats;
pub mod targets;
mod tunnel_table;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;

use self::checks::Verdict;
use self::live::Wrong;
use self::screen::{Screen, Tone};
use self::stats::{Stats, bytes};
use self::world::{CREDIT_LINKS, TUNNELS, World};
use crate::signals::Signals;
use adit_config::DemoOptions;

/// Runs the demo: with `once` until every frontend was checked, else until a signal.
///
/// The exit code is 0 only if every byte and answer was right.
///
/// # Errors
/// A part cannot be started; the error names it.
pub async fn run(options: DemoOptions) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::of_terminal().context("signals")?;
    let screen = Screen::new(options.plain);
    screen.working("certificates, server, agents, targets");
    let started = tokio::select! {
        started = World::start(&options) => started,
        () = signals.next() => return Ok(ExitCode::FAILURE),
    };
    let world = match started {
        Ok(world) => world,
        Err(error) => {
            screen.finish();
            return Err(error.context("demo"));
        }
    };
    let outcome = drive(&world, &screen, options.once, &mut signals).await;
    screen.finish();
    world.stop().await;
    let all_right = outcome.context("demo")?;
    Ok(if all_right {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs the checks and the load; returns whether every byte and answer was right.
async fn drive(
    world: &World,
    screen: &Screen,
    once: bool,
    signals: &mut Signals,
) -> anyhow::Result<bool> {
    introduce(world, screen);
    let stats = Stats::default();
    let started = Instant::now();
    let verdict = tokio::select! {
        verdict = checks::all(world, &stats, screen) => verdict,
        () = signals.next() => {
            screen.line("stopped before every check was made");
            return Ok(false);
        }
    };
    summarize(world, screen, &stats, &verdict, started);
    if once {
        return Ok(verdict.wrong.is_empty());
    }
    guide::print(world, screen)?;
    screen.line("");
    let wrong = Wrong::default();
    tokio::select! {
        never = live::drive(world, &stats, screen, &wrong) => match never {},
        () = live::show(world, &stats, screen, &wrong) => (),
        () = signals.next() => (),
    }
    screen.finish();
    let tunnels = world.series(TUNNELS);
    let (down, up) = stats.moved();
    screen.line(format_args!(
        "stopped: {tunnels} tunnels, {} down, {} up, {} wrong",
        bytes(down),
        bytes(up),
        verdict.wrong.len() + wrong.count()
    ));
    Ok(verdict.wrong.is_empty() && wrong.count() == 0)
}

fn introduce(world: &World, screen: &Screen) {
    let faint = |text: String| screen.paint(Tone::Faint, text);
    screen.line(screen.paint(Tone::Strong, "Adit demo"));
    screen.line(format_args!(
        "  server    {} links from agents on {}",
        world.server.links(),
        faint(world.server.agents.to_string())
    ));
    for agent in &world.agents {
        screen.line(format_args!(
            "  agent     {} reaches {}",
            agent.name, agent.reaches
        ));
    }
    screen.line(format_args!(
        "  targets   web {}, bulk {}",
        world.web, world.bulk
    ));
}

fn summarize(world: &World, screen: &Screen, stats: &Stats, verdict: &Verdict, started: Instant) {
    let (down, up) = stats.moved();
    screen.line(screen.paint(Tone::Strong, "Summary"));
    screen.line(format_args!(
        "  tunnels   {} over {} links, {} with credit",
        world.series(TUNNELS),
        world.server.links(),
        world.series(CREDIT_LINKS)
    ));
    screen.line(format_args!(
        "  bytes     {} down, {} up",
        bytes(down),
        bytes(up)
    ));
    screen.line(format_args!("  dial      {}", stats.dials.percentiles()));
    screen.line(format_args!("  answer    {}", stats.answers.percentiles()));
    let (right, wrong) = (verdict.right, &verdict.wrong);
    let seconds = started.elapsed().as_secs_f64();
    if wrong.is_empty() {
        let text = format!("all {right} checks right");
        screen.line(format_args!(
            "  result    {} in {seconds:.1} s",
            screen.paint(Tone::Good, text)
        ));
        return;
    }
    let text = format!("{} of {} checks wrong", wrong.len(), right + wrong.len());
    screen.line(format_args!(
        "  result    {} in {seconds:.1} s",
        screen.paint(Tone::Bad, text)
    ));
    for what in wrong {
        screen.line(format_args!("            {what}"));
    }
}
