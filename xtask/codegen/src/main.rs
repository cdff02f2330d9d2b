//! Generates the protobuf messages (into `adit-core`), without protoc. `cargo xtask codegen` runs it in the root folder of the
//! repository; a package of its own, since nothing else needs what it is built of.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};

/// First line of the generated file; `cargo xtask tidy` knows them by it.
const MARK: &str = "//! Made by `cargo xtask codegen` from konnectivity.proto; do not edit.";

/// Lints that generated code need not follow.
const LINTS: &str = "#![allow(clippy::all, clippy::pedantic, unreachable_pub, unused_qualifications, \
     elided_lifetimes_in_paths, reason = \"generated code\")]";

/// Regenerates the file, or with `--check` fails when the committed one differs.
fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let check = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--check"] => true,
        _ => bail!("{arguments:?} is not understood: there is only --check"),
    };
    let proto = Path::new("tunnel-daemon/proto/konnectivity.proto");
    let out = Path::new("target/codegen");
    let descriptors = protox::compile([proto], ["tunnel-daemon/proto"])?;

    let messages = out.join("messages");
    std::fs::create_dir_all(&messages)?;
    prost_build::Config::new()
        .bytes(["."])
        .default_package_filename("packets")
        .out_dir(&messages)
        .compile_fds(descriptors)?;

    let fresh = messages.join("packets.rs");
    let committed = Path::new("tunnel-daemon/core/src/wire/packets.rs");
    let text =
        std::fs::read_to_string(&fresh).with_context(|| format!("read {}", fresh.display()))?;
    let text = formatted(&format!("{MARK}\n{LINTS}\n{text}"))?;
    settle(committed, &text, check)
        .with_context(|| format!("generated file {}", committed.display()))
}

/// Writes the text, or with `check` compares it.
fn settle(committed: &Path, text: &str, check: bool) -> anyhow::Result<()> {
    if check {
        let now = std::fs::read_to_string(committed).context("cannot be read")?;
        ensure!(
            now == text,
            "is not what the .proto file gives: run `cargo xtask codegen`"
        );
        return Ok(());
    }
    if let Some(folder) = committed.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(committed, text).context("cannot be written")
}

/// Passes the text through rustfmt, so that `cargo fmt --check` needs no exception for generated files.
fn formatted(text: &str) -> anyhow::Result<String> {
    let mut rustfmt = Command::new("rustfmt");
    rustfmt.args(["--edition", "2024", "--emit", "stdout"]);
    let mut child = rustfmt
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("start rustfmt (`rustup component add rustfmt`)")?;
    let mut input = child.stdin.take().context("rustfmt's input is piped")?;
    // Written from a thread: rustfmt may fill its output pipe before it has read all of its input.
    let source = text.to_owned();
    let writer = std::thread::spawn(move || input.write_all(source.as_bytes()));
    let output = child.wait_with_output().context("read from rustfmt")?;
    writer
        .join()
        .ok()
        .context("the writer to rustfmt ended early")??;
    ensure!(
        output.status.success(),
        "rustfmt ended with {}",
        output.status
    );
    String::from_utf8(output.stdout).context("rustfmt gave text that is not UTF-8")
}
