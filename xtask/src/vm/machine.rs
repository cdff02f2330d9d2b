//! One virtual machine: booted by qemu, read from its console, ended by itself or at its limit.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::console::{self, Console};

/// Memory of a machine: the first file system takes half of it.
const MEMORY: &str = "1536";
/// Until the first process speaks. A processor that the host claims and cannot give hangs before that.
const FIRST_WORD_KVM: Duration = Duration::from_secs(15);
const FIRST_WORD: Duration = Duration::from_secs(300);

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

    /// Its name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
        }
    }
}

/// Whether the host offers KVM at all; whether it works is seen by booting.
pub(super) fn offers_kvm() -> bool {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok()
}

/// The program, or why there is none.
pub(super) fn missing() -> Option<String> {
    let known = Command::new(QEMU).arg("--version").output();
    known
        .is_err()
        .then(|| format!("{QEMU} is not installed: it comes with qemu-system-x86"))
}

const QEMU: &str = "qemu-system-x86_64";

/// Why a machine gave no full answer.
pub(super) enum Failure {
    /// It never spoke, and this came instead; another accelerator may do.
    Mute(String),
    /// Anything else.
    Other(anyhow::Error),
}

/// Boots the kernel with this first file system and returns what the console said. `limit` is for all of it.
///
/// # Errors
/// See [`Failure`].
pub(super) fn boot(
    accel: Accel,
    kernel: &Path,
    initramfs: &Path,
    limit: Duration,
) -> Result<Console, Failure> {
    let [accelerator, processor] = accel.words();
    let mut command = Command::new(QEMU);
    command
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
        .stderr(Stdio::piped());
    let mut machine = Machine::start(&mut command).map_err(Failure::Other)?;
    let first = match accel {
        Accel::Kvm => FIRST_WORD_KVM,
        Accel::Tcg => FIRST_WORD,
    };
    machine.listen(first, limit)
}

/// A running machine; dropping it ends it.
struct Machine {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Machine {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        let mut child = command.spawn().with_context(|| format!("start {QEMU}"))?;
        let output = child.stdout.take().context("the console is piped")?;
        let errors = child.stderr.take().context("errors are piped")?;
        let (told, lines) = mpsc::sync_channel(1024);
        let also_told = told.clone();
        std::thread::spawn(move || read(output, &told));
        std::thread::spawn(move || read(errors, &also_told));
        Ok(Self { child, lines })
    }

    fn listen(&mut self, first: Duration, limit: Duration) -> Result<Console, Failure> {
        let begin = Instant::now();
        let mut console = Console::default();
        loop {
            let allowed = if console.has_spoken() { limit } else { first };
            let left = (begin + allowed).saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    console.handle_line(&line);
                    if let Some((_before, measured)) = line.split_once("MEASURED ") {
                        println!("    {measured}");
                    }
                    // At once: a machine takes longer than anybody waits for a word.
                    if let Some(ended) = console::ended(&line) {
                        println!(
                            "  {:18} status {}, {:.1} s",
                            ended.name, ended.status, ended.seconds
                        );
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) if !console.has_spoken() => {
                    let silent = format!("nothing within {} s", first.as_secs());
                    return Err(Failure::Mute(silent));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let error = anyhow::anyhow!(
                        "the machine was still running after {} s, {}",
                        limit.as_secs(),
                        console.last_words()
                    );
                    return Err(Failure::Other(error));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        if !console.has_spoken() {
            return Err(Failure::Mute(console.last_words()));
        }
        self.ended(&console).map_err(Failure::Other)?;
        Ok(console)
    }

    fn ended(&mut self, console: &Console) -> anyhow::Result<()> {
        let status = self.child.wait()?;
        if status.success() && console.is_complete() {
            return Ok(());
        }
        bail!(
            "the machine ended early ({status}), {}",
            console.last_words()
        )
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Errors mean that it has ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn read(output: impl Read, told: &mpsc::SyncSender<String>) {
    for line in BufReader::new(output).split(b'\n') {
        let Ok(line) = line else { return };
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if told.send(line).is_err() {
            return;
        }
    }
}
