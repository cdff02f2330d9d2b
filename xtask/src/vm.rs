//! `cargo xtask vm`: boots distribution kernels in virtual machines, runs Adit's programs and tests there, and prints a table
//! of kernels and features.
//!
//! Kernels come as packages and are unpacked below `target/vm`; nothing is installed. Programs come from the developer's build,
//! with their libraries. A table row is an entry of [`entries::ENTRIES`].

mod console;
mod console_log;
mod entries;
mod image;
mod kernels;
mod machine;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::ebpf;
use crate::steps::{MINUTES_5, lacking, run_command};
use crate::workspace::Workspace;
use console::Console;
use console_log::ConsoleLogs;
use entries::{ENTRIES, Entry, Run, When};
use image::Built;
use kernels::Kernel;
use machine::Accel;
use table::{Answers, Made};

pub(crate) use table::titles;

/// Page that holds the table.
pub(crate) const PAGE: &str = "docs/kernels.md";
/// Time for a machine besides its entries: boot, modules, shutdown.
const AROUND: Duration = Duration::from_secs(120);

/// Which kernels and what.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Boot the newest kernel of this series, such as 6.12; `newest` is the newest there is. Repeatable.
    #[arg(long, value_name = "SERIES")]
    kernel: Vec<String>,
    /// Boot the oldest supported kernel, the one of the stable distribution and the newest.
    #[arg(long, conflicts_with = "kernel")]
    all: bool,
    /// Show the series there are, and the entries, and end.
    #[arg(long)]
    list: bool,
    /// Run only this entry; repeatable.
    #[arg(long, value_name = "ENTRY")]
    only: Vec<String>,
    /// Also measure paths of 100 ms, with and without loss.
    #[arg(long)]
    wan: bool,
    /// Write the table to docs/kernels.md, which has all rows. A run that was cut off goes on where it ended: kernels that
    /// passed all of it at this commit are not booted again.
    #[arg(long, requires = "all", conflicts_with_all = ["only", "wan"])]
    write: bool,
    /// What executes the machine; KVM where it works if not given.
    #[arg(long)]
    accel: Option<Accel>,
    /// Another `adit` for the scripts in the machine, such as a static one.
    #[arg(long, value_name = "FILE")]
    adit: Option<PathBuf>,
}

impl Args {
    fn asks_for(&self, entry: &Entry) -> bool {
        if !self.only.is_empty() {
            return self.only.iter().any(|name| name == entry.name);
        }
        match entry.when {
            When::Always => true,
            When::Wan => self.wan,
            When::Named => false,
        }
    }
}

/// Whether machines can be booted here; otherwise what is missing.
pub(crate) fn availability() -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("kernels are booted for x86-64 only".to_owned());
    }
    // The rest of what is packed comes with these.
    let missing = lacking(&[
        machine::QEMU,
        "apt-get",
        "busybox",
        "dash",
        "nft",
        "setpriv",
        "tc",
    ]);
    missing.map_or(Ok(()), Err)
}

/// The rows of the page, in order: all entries except measurements and those that run only by name.
pub(crate) fn rows() -> Vec<&'static str> {
    let is_on_page = |entry: &&Entry| entry.when == When::Always;
    let asked = ENTRIES.iter().filter(is_on_page);
    asked.map(|entry| entry.row).collect()
}

/// Fetches the kernels that were not fetched before.
///
/// # Errors
/// Kernels or lists of packages are missing, and cannot be fetched.
pub(crate) fn fetched(workspace: &Workspace) -> anyhow::Result<()> {
    kernels::get(workspace, kernels::SERIES).map(drop)
}

/// Boots the kernels and prints the table.
///
/// # Errors
/// A tool is missing, a kernel does not boot, or a test in a machine fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    if let Err(why) = availability() {
        bail!("{why}");
    }
    let folder = workspace.target().join("vm");
    fs::create_dir_all(&folder)?;
    if args.list {
        return list(workspace);
    }
    for name in &args.only {
        let known = ENTRIES.iter().any(|entry| entry.name == name);
        ensure!(known, "no entry is named {name:?}; `--list` shows all");
    }
    let series: Vec<&str> = match (args.all, args.kernel.as_slice()) {
        (false, []) => vec![kernels::OLDEST],
        (false, some) => some.iter().map(String::as_str).collect(),
        (true, _) => kernels::SERIES.to_vec(),
    };
    let kernels = kernels::get(workspace, &series)?;
    // Read the commit before the build: the tree may change during a long run.
    let made = args.write.then(|| made(workspace)).transpose()?;
    let logs = made.as_ref().map(|made| ConsoleLogs::new(&folder, made));
    let built = Built::build(workspace)?;
    let (entries, left_out) = chosen(args, &built);
    let (common, modules, image) = (
        folder.join("common"),
        folder.join("modules"),
        folder.join("initramfs"),
    );
    image::common(workspace, args.adit.as_deref(), &built, &entries, &common)?;
    let mut accel = args.accel;
    let mut all = Vec::new();
    for kernel in &kernels {
        let earlier = logs.as_ref().and_then(|logs| logs.earlier(&kernel.release));
        let is_new = earlier.is_none();
        let (used, console) = match earlier {
            Some(earlier) => {
                println!("vm: {} has passed before, at this commit", kernel.release);
                earlier
            }
            None => {
                image::of_kernel(workspace, &kernel.folder, &modules)?;
                fs::write(&image, [fs::read(&common)?, fs::read(&modules)?].concat())?;
                // An accelerator that failed for one kernel is not tried for the next ones.
                let (used, console) = boot(accel, kernel, &image, limit(&entries))?;
                accel = Some(used);
                (used, console)
            }
        };
        report(&entries, &console);
        let answers = Answers {
            series: kernel.series.clone(),
            accel: used,
            console,
        };
        let (_table, failed) = table::render(&entries, slice::from_ref(&answers));
        if let Some(logs) = logs.as_ref().filter(|_| is_new && failed.is_empty()) {
            logs.keep(&kernel.release, used, &answers.console)?;
        }
        all.push(answers);
    }
    let (table, failed) = table::render(&entries, &all);
    println!("{table}");
    for line in &left_out {
        println!("vm: SKIPPED {line}");
    }
    if let Some(made) = made {
        let page = table::page(&table, &left_out, &all, &made);
        fs::write(workspace.path(PAGE), page)?;
        println!("vm: wrote {PAGE}");
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

/// The sources that a page names: commit and eBPF object.
fn made(workspace: &Workspace) -> anyhow::Result<Made> {
    Ok(Made {
        commit: workspace.commit(),
        object: ebpf::object_hash(workspace)?,
    })
}

fn list(workspace: &Workspace) -> anyhow::Result<()> {
    println!("kernels:");
    run_command(&mut kernels::list(workspace), MINUTES_5)?;
    println!("entries:");
    for entry in ENTRIES {
        println!("  {:16} {} ({:?})", entry.name, entry.row, entry.when);
    }
    Ok(())
}

/// The entries to run, and why other requested entries cannot run.
fn chosen(args: &Args, built: &Built) -> (Vec<&'static Entry>, Vec<String>) {
    let (mut entries, mut left_out) = (Vec::new(), Vec::new());
    for entry in ENTRIES.iter().filter(|entry| args.asks_for(entry)) {
        match entry.run {
            Run::Tests { source, .. } if built.test(source).is_none() => {
                left_out.push(format!("{}: there is no {source}", entry.row));
            }
            _ => entries.push(entry),
        }
    }
    (entries, left_out)
}

fn limit(entries: &[&Entry]) -> Duration {
    let inside: u64 = entries.iter().map(|entry| entry.limit_seconds).sum();
    AROUND + Duration::from_secs(inside)
}

/// Boots with `accel` if given; otherwise with KVM if it works, else emulated.
fn boot(
    accel: Option<Accel>,
    kernel: &Kernel,
    image: &Path,
    limit: Duration,
) -> anyhow::Result<(Accel, Console)> {
    let wanted = match accel {
        Some(accel) => vec![accel],
        None if machine::offers_kvm() => vec![Accel::Kvm, Accel::Tcg],
        None => vec![Accel::Tcg],
    };
    for accel in wanted {
        println!("vm: booting {} with {}", kernel.release, accel.name());
        let begin = Instant::now();
        let console = machine::boot(accel, &kernel.folder.join("vmlinuz"), image, limit)
            .with_context(|| format!("Linux {}", kernel.release))?;
        if let Some(console) = console {
            println!("vm: it ran for {:.1} s", begin.elapsed().as_secs_f64());
            return Ok((accel, console));
        }
    }
    bail!("Linux {} does not boot here", kernel.release)
}

/// Prints the output of failed tests.
fn report(entries: &[&Entry], console: &Console) {
    for line in &console.modules {
        println!("vm: module not loaded: {line}");
    }
    for (at, entry) in entries.iter().enumerate() {
        let name = image::console_name(at, entry);
        let Some(ran) = console.ran(&name) else {
            continue;
        };
        let fact = matches!(entry.run, Run::Fact(_));
        let quiet = ran.status == Some(0) && entry.when != When::Wan;
        if !fact && !quiet {
            println!("  {name}:");
            for line in &ran.lines {
                println!("    {line}");
            }
        }
    }
}
