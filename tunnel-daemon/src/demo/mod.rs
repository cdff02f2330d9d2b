//! `adit demo`: a whole installation in one process, which tells its story in three acts, with commands to try by hand.

mod acts;
mod captured;
mod checks;
mod driver;
mod folder;
mod frontend;
pub mod grpc_client;
mod guide;
mod http_client;
mod live;
mod paths;
mod screen;
mod stats;
mod steps;
mod targets;
mod world;

use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::Context as _;

use self::driver::Driver;
use self::screen::{BAD, GOOD, HEADING, Screen};
use self::steps::Steps;
use self::world::World;
use crate::signals::Signals;
use adit_config::DemoOptions;

/// Runs the demo: with `once` until the acts are played and every frontend was checked, else until a signal.
///
/// The exit code is 0 only if every byte and answer was right.
///
/// # Errors
/// A part cannot be started; the error names it.
pub async fn run(options: DemoOptions) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::of_terminal().context("signals")?;
    let screen = Screen::new(options.plain);
    let title = "Adit demo: a server, two agents and two targets in this process";
    screen.line(screen.paint(HEADING, title));
    screen.working("certificates, server, agents, targets");
    let started = tokio::select! {
        started = World::start(&options) => started,
        () = signals.next() => return Ok(ExitCode::FAILURE),
    };
    screen.working("");
    let world = started.context("demo")?;
    let outcome = Box::pin(drive(&world, &screen, &options, &mut signals)).await;
    world.stop().await;
    Ok(if outcome.context("demo")? {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Plays the acts, and runs checks and load as asked; returns whether every byte and answer was right.
async fn drive(
    world: &World,
    screen: &Screen,
    options: &DemoOptions,
    signals: &mut Signals,
) -> anyhow::Result<bool> {
    let started = Instant::now();
    let mut steps = Steps::new(screen, options.verbose);
    let [_grpc, frontend, _tls] = &world.frontends;
    let driver = Driver { world, frontend };
    let played = async {
        acts::all(&driver, &mut steps).await;
        if options.once || options.verbose {
            checks::all(world, &mut steps).await;
        }
    };
    tokio::select! {
        () = played => (),
        () = signals.next() => {
            screen.line("stopped before every check was made");
            return Ok(false);
        }
    }
    screen.line("Measured beside Konnectivity: docs/performance.md");
    if options.once || options.verbose {
        summarize(world, screen, &steps, started);
    }
    if options.once {
        return Ok(steps.wrong.is_empty());
    }
    guide::print(world, screen)?;
    tokio::select! {
        never = live::drive(world, screen) => match never {},
        () = live::show(world, screen) => (),
        () = signals.next() => (),
    }
    let summary = live::summary(world);
    screen.line(format_args!("stopped: {summary}"));
    Ok(steps.wrong.is_empty() && world.stats.wrong.load(Relaxed) == 0)
}

fn summarize(world: &World, screen: &Screen, steps: &Steps<'_>, started: Instant) {
    screen.line(screen.paint(HEADING, "Summary"));
    screen.line(format_args!("  bytes     {}", world.stats.moved()));
    let wrong = steps.wrong.len();
    let all = steps.right + wrong;
    let result = match wrong {
        0 => screen.paint(GOOD, format_args!("all {all} checks right")),
        _ => screen.paint(BAD, format_args!("{wrong} of {all} checks wrong")),
    };
    let seconds = started.elapsed().as_secs_f64();
    screen.line(format_args!("  result    {result} in {seconds:.1} s"));
}
