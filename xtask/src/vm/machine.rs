//! A virtual machine: booted by qemu, watched on its console, ended by itself or at its time limit.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::console::{self, Console};
use crate::steps::Running;

/// Memory of a machine, MiB: the first file system takes half of it.
const MEMORY: &str = "1536";
/// Time limits for the first process to start, with KVM and emulated. With KVM an unusable processor hangs before that.
const FIRST_WORD_KVM: Duration = Duration::from_secs(15);
const FIRST_WORD: Duration = Duration::from_secs(300);
/// Time for qemu to exit after its machine.
const END: Duration = Duration::from_secs(30);

/// What executes the machine's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Accel {
    /// The host's processor.
    Kvm,
    /// An emulation of one.
    Tcg,
}

impl Accel {
    fn words(self) -> [&'static str; 2] {
        match self {
            Self::Kvm => ["kvm", "host"],
            // Pages of five levels only cost time in an emulation.
            Self::Tcg => ["tcg,thread=multi", "max,la57=off"],
        }
    }

    /// The accelerator's name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
        }
    }
}

/// Whether the host offers KVM; only a boot shows whether it works.
pub(super) fn offers_kvm() -> bool {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok()
}

/// The program of a machine.
pub(super) const QEMU: &str = "qemu-system-x86_64";

/// Boots the kernel with this first file system and returns the console. `limit` bounds the whole run. `None`: the console
/// stayed silent, and another accelerator may work; prints the reason.
///
/// # Errors
/// The machine cannot be started, or ends too early or too late.
pub(super) fn boot(
    accel: Accel,
    kernel: &Path,
    initramfs: &Path,
    limit: Duration,
) -> anyhow::Result<Option<Console>> {
    let [accelerator, processor] = accel.words();
    let mut child = Command::new(QEMU)
        .args(["-machine", "q35", "-accel", accelerator, "-cpu", processor])
        .args(["-m", MEMORY, "-smp", "2", "-nic", "none", "-no-reboot"])
        .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        .args([
            "-append",
            "console=ttyS0 quiet loglevel=1 panic=-1 oops=panic",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {QEMU}"))?;
    let output = child.stdout.take().context("the console is piped")?;
    let errors = child.stderr.take().context("errors are piped")?;
    let mut machine = Running::of(child);
    let (sender, lines) = mpsc::sync_channel(1024);
    let also = sender.clone();
    std::thread::spawn(move || read(output, &sender));
    std::thread::spawn(move || read(errors, &also));
    let first = match accel {
        Accel::Kvm => FIRST_WORD_KVM,
        Accel::Tcg => FIRST_WORD,
    };
    let begin = Instant::now();
    let mut console = Console::default();
    let end = loop {
        let allowed = if console.has_spoken() { limit } else { first };
        let left = (begin + allowed).saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) => take(&mut console, &line),
            Err(end) => break end,
        }
    };
    let (seconds, words) = (begin.elapsed().as_secs(), console.last_words());
    if !console.has_spoken() {
        println!(
            "vm: no word from it with {} within {seconds} s, {words}",
            accel.name()
        );
        return Ok(None);
    }
    ensure!(
        end == RecvTimeoutError::Disconnected,
        "the machine was still running after {seconds} s, {words}"
    );
    let status = machine.ends_within(END)?;
    ensure!(
        console.is_complete() && status.is_some_and(|status| status.success()),
        "the machine ended early, {words}"
    );
    Ok(Some(console))
}

/// Handles a line. Prints the result of an entry at once: a machine runs longer than people wait for output.
fn take(console: &mut Console, line: &str) {
    console.handle_line(line);
    if let Some((_before, measured)) = line.split_once("MEASURED ") {
        println!("    {measured}");
    }
    if let Some(ended) = console::ended(line) {
        let console::Ended {
            name,
            status,
            seconds,
        } = ended;
        println!("  {name:18} status {status}, {seconds:.1} s");
    }
}

fn read(output: impl Read, lines: &mpsc::SyncSender<String>) {
    for line in BufReader::new(output).split(b'\n') {
        let Ok(line) = line else { return };
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if lines.send(line).is_err() {
            return;
        }
    }
}
