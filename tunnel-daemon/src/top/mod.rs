//! `adit top`: the open tunnels of a running server or agent, with rates, as one picture or live.

mod frame;
mod live;
mod model;
#[cfg(test)]
mod tests;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use self::frame::Picture;
use self::model::Sampler;
use crate::status::Socket;
use crate::status::tables::agents;
use crate::status::text::{WIDTH, show};
use adit_config::TopOptions;

/// Prints one picture, or runs the live view until the user quits.
///
/// # Errors
/// The first query fails, or the terminal cannot be used.
pub(super) fn run(options: &TopOptions) -> anyhow::Result<ExitCode> {
    let socket = Socket::of(&options.socket)?;
    if !options.once && !options.json {
        return live::run(&socket, options);
    }
    let mut sampler = Sampler::default();
    sampler.take(socket.tunnels()?, std::time::Instant::now());
    std::thread::sleep(options.interval);
    let sample = sampler.take(socket.tunnels()?, std::time::Instant::now());
    let picture = Picture::new(sample, options.sort);
    if options.json {
        let json = serde_json::to_string(&picture.sample)?;
        show(&format!("{json}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let is_short = std::io::stdout().is_terminal();
    let mut lines = picture.all(is_short.then_some(WIDTH));
    let agents = agents(&picture.sample.agents, is_short);
    if !agents.is_empty() {
        lines.push(String::new());
        lines.extend(agents.into_iter().map(|line| line.text));
    }
    show(&format!("{}\n", lines.join("\n")))?;
    Ok(ExitCode::SUCCESS)
}
