//! `cargo xtask vm`: boots kernels of distributions in virtual machines, runs our programs and tests there, and shows a table
//! of kernels and features.
//!
//! Kernels come as packages and are unpacked below `target/vm`; the system stays as it is. Programs are those of the
//! developer's build, with their libraries. A row is an entry of [`entries::ENTRIES`].

mod console;
mod cpio;
mod entries;
mod image;
mod kernels;
mod machine;
mod modules;
mod programs;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::steps::in_ci;
use crate::workspace::Workspace;
use console::Console;
use entries::{APART, ENTRIES, Entry, Run, When};
use kernels::{Kernel, Packages};
use machine::{Accel, Failure};
use programs::Built;
use table::Answers;

/// Where the table goes.
const PAGE: &str = "docs/kernels.md";
/// Time for a machine beside its entries: boot, modules, end.
const AROUND: Duration = Duration::from_secs(120);
/// Longest time for a machine in CI.
const CI_LIMIT: Duration = Duration::from_secs(1200);

/// Which kernels and what.
#[derive(clap::Args, Default)]
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
    /// Write the table to docs/kernels.md.
    #[arg(long, requires = "all")]
    write: bool,
    /// What executes the machine; KVM where it works if not given.
    #[arg(long)]
    accel: Option<Accel>,
    /// Another `adit` for the scripts in the machine, such as a static one.
    #[arg(long, value_name = "FILE")]
    adit: Option<PathBuf>,
    /// Only the rows that CI has the time for.
    #[arg(long)]
    short: bool,
}

impl Args {
    /// As CI runs it: one kernel.
    pub(crate) fn for_ci() -> Self {
        Self {
            kernel: vec![kernels::CI.to_owned()],
            short: true,
            ..Self::default()
        }
    }

    fn asks_for(&self, entry: &Entry) -> bool {
        if !self.only.is_empty() {
            return self.only.iter().any(|name| name == entry.name);
        }
        match entry.when {
            When::Always => true,
            When::ByHand => !self.short,
            When::Wan => self.wan,
        }
    }
}

/// Whether machines can be booted here; otherwise what is missing.
pub(crate) fn availability() -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("kernels are booted for x86-64 only".to_owned());
    }
    let missing = machine::missing()
        .or_else(Packages::missing)
        .or_else(image::missing);
    missing.map_or(Ok(()), Err)
}

/// Fetches the kernel of CI, unless it was fetched before.
///
/// # Errors
/// Neither it nor the lists of packages can be fetched.
pub(crate) fn kernel_for_ci(workspace: &Workspace) -> anyhow::Result<()> {
    let packages = Packages::read(&workspace.path("target/vm"))?;
    packages.kernel(kernels::CI).map(drop)
}

/// Boots the kernels and prints the table.
///
/// # Errors
/// Something is missing here, a kernel does not boot, or a test in a machine fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    if let Err(why) = availability() {
        bail!("{why}");
    }
    let folder = workspace.path("target/vm");
    fs::create_dir_all(&folder)?;
    let packages = Packages::read(&folder)?;
    if args.list {
        return list(&packages);
    }
    for name in &args.only {
        let known = ENTRIES.iter().any(|entry| entry.name == name);
        ensure!(known, "no entry is named {name:?}; `--list` shows all");
    }
    let series: Vec<&str> = match (args.all, args.kernel.as_slice()) {
        (false, []) => vec![kernels::CI],
        (false, some) => some.iter().map(String::as_str).collect(),
        (true, _) => kernels::SERIES.to_vec(),
    };
    let kernels: Vec<Kernel> = series
        .into_iter()
        .map(|series| packages.kernel(series))
        .collect::<Result<_, _>>()?;
    let built = Built::build(workspace)?;
    let (entries, left_out) = chosen(args, &built);
    let machines = machines(&entries, several_fit());
    let images: Vec<Vec<u8>> = machines
        .iter()
        .map(|entries| image::common(args, &built, entries))
        .collect::<Result<_, _>>()?;
    let mut accel = args.accel;
    let mut all = Vec::new();
    for kernel in &kernels {
        let modules = image::of_kernel(kernel)?;
        let mut plans = Vec::new();
        for (at, (entries, common)) in machines.iter().zip(&images).enumerate() {
            let image = folder.join(format!("initramfs-{at}"));
            fs::write(&image, [common.as_slice(), modules.as_slice()].concat())?;
            plans.push((image, limit(args, entries)));
        }
        let (used, console) = boot_all(accel, kernel, &plans)?;
        // What did not work for one kernel is not tried again.
        accel = Some(used);
        report(&entries, &console);
        let series = kernel.series.clone();
        all.push(Answers {
            series,
            accel: used,
            console,
        });
    }
    let (table, failed) = table::render(&entries, &all);
    println!("{table}");
    for line in &left_out {
        println!("vm: SKIPPED {line}");
    }
    if args.write {
        fs::write(workspace.path(PAGE), table::page(&table, &left_out, &all))?;
        println!("vm: wrote {PAGE}");
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn list(packages: &Packages) -> anyhow::Result<()> {
    println!("kernels:");
    for release in packages.all() {
        println!("  {release}");
    }
    println!("entries:");
    for entry in ENTRIES {
        println!("  {:16} {} ({:?})", entry.name, entry.row, entry.when);
    }
    Ok(())
}

/// The entries to run, and why others that were asked for cannot.
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

/// An entry of a run, with its place in it.
type Placed = (usize, &'static Entry);

/// The entries of each machine. Two stand side by side where that is allowed, unless one of them measures.
fn machines(entries: &[&'static Entry], side_by_side: bool) -> Vec<Vec<Placed>> {
    let all: Vec<Placed> = entries.iter().copied().enumerate().collect();
    if !side_by_side || entries.iter().any(|entry| entry.when == When::Wan) {
        return vec![all];
    }
    let (apart, rest): (Vec<Placed>, Vec<Placed>) = all
        .into_iter()
        .partition(|(_at, entry)| APART.contains(&entry.name));
    let mut machines = vec![apart, rest];
    machines.retain(|entries| !entries.is_empty());
    machines
}

/// Whether this computer has the processors and the memory for two machines.
fn several_fit() -> bool {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= 2)
        && available_mebibytes(&meminfo).is_some_and(|there| there >= 2 * machine::MEBIBYTES)
}

/// `MemAvailable` of `/proc/meminfo`, which counts in KiB.
fn available_mebibytes(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes / 1024)
}

fn limit(args: &Args, entries: &[Placed]) -> Duration {
    if args.short && in_ci() {
        return CI_LIMIT;
    }
    let inside: u64 = entries.iter().map(|(_at, entry)| entry.limit_seconds).sum();
    AROUND + Duration::from_secs(inside)
}

/// Boots a machine for each image, side by side, each with its limit, and puts together what they say.
fn boot_all(
    accel: Option<Accel>,
    kernel: &Kernel,
    plans: &[(PathBuf, Duration)],
) -> anyhow::Result<(Accel, Console)> {
    let booted: Vec<anyhow::Result<(Accel, Console)>> = std::thread::scope(|scope| {
        let running: Vec<_> = plans
            .iter()
            .map(|(image, limit)| scope.spawn(move || boot(accel, kernel, image, *limit)))
            .collect();
        running
            .into_iter()
            .map(|machine| {
                let ended = machine.join();
                ended.unwrap_or_else(|_panic| bail!("the thread of a machine panicked"))
            })
            .collect()
    });
    let mut together: Option<(Accel, Console)> = None;
    for machine in booted {
        let (accel, console) = machine?;
        match &mut together {
            None => together = Some((accel, console)),
            Some((used, first)) => {
                // Where one of them had to be emulated, nothing else works for all.
                if accel == Accel::Tcg {
                    *used = accel;
                }
                first.absorb(console);
            }
        }
    }
    together.context("there is nothing to run")
}

/// Boots with KVM if nothing else is asked for and it works, else emulated.
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
        match machine::boot(accel, &kernel.image(), image, limit) {
            Ok(console) => {
                println!("vm: it ran for {:.1} s", begin.elapsed().as_secs_f64());
                return Ok((accel, console));
            }
            Err(Failure::Mute(why)) => println!("vm: no word from it with {}: {why}", accel.name()),
            Err(Failure::Other(error)) => {
                return Err(error.context(format!("Linux {}", kernel.release)));
            }
        }
    }
    bail!("Linux {} does not boot here", kernel.release)
}

/// Begins what a test found out about the kernel it runs on.
const FOUND: &str = "FOUND ";

/// What each entry took, what its tests found out, and what the failed ones printed.
fn report(entries: &[&Entry], console: &Console) {
    for line in &console.modules {
        println!("vm: module not loaded: {line}");
    }
    for (at, entry) in entries.iter().enumerate() {
        let name = image::console_name(at, entry);
        let Some(ran) = console.ran(&name) else {
            continue;
        };
        let status = ran
            .status
            .map_or_else(|| "?".to_owned(), |code| code.to_string());
        println!("  {:16} status {status}, {:.1} s", entry.name, ran.seconds);
        let fact = matches!(entry.run, Run::Fact(_));
        let quiet = ran.status == Some(0) && entry.when != When::Wan;
        let found = ran
            .lines
            .iter()
            .filter_map(|line| line.find(FOUND).map(|at| &line[at..]));
        if !fact && !quiet {
            for line in &ran.lines {
                println!("    {line}");
            }
        } else {
            for line in found {
                println!("    {line}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(machines: &[Vec<Placed>]) -> Vec<Vec<&'static str>> {
        let names = |entries: &Vec<Placed>| entries.iter().map(|(_at, entry)| entry.name).collect();
        machines.iter().map(names).collect()
    }

    #[test]
    fn what_takes_longest_has_a_machine_beside_that_of_all_others() {
        let entries: Vec<&Entry> = ENTRIES
            .iter()
            .filter(|entry| entry.when == When::Always)
            .collect();
        let split = machines(&entries, true);
        let [apart, rest] = split.as_slice() else {
            panic!("{:?}", names(&split));
        };
        assert_eq!(apart.len(), APART.len());
        assert_eq!(apart.len() + rest.len(), entries.len());
        for (at, entry) in apart.iter().chain(rest) {
            assert_eq!(entries[*at].name, entry.name);
        }
        assert_eq!(machines(&entries, false).len(), 1);
    }

    #[test]
    fn memory_that_is_there_is_what_the_kernel_says() {
        let meminfo = "MemTotal:       25000000 kB\nMemAvailable:    3145728 kB\n";
        assert_eq!(available_mebibytes(meminfo), Some(3072));
        assert_eq!(available_mebibytes("MemTotal: 1 kB"), None);
    }

    #[test]
    fn a_measurement_has_the_computer_to_itself() {
        let entries: Vec<&Entry> = ENTRIES.iter().collect();
        assert_eq!(machines(&entries, true).len(), 1);
    }

    #[test]
    fn an_entry_alone_boots_one_machine() {
        let only: Vec<&Entry> = ENTRIES
            .iter()
            .filter(|entry| entry.name == "demo")
            .collect();
        assert_eq!(names(&machines(&only, true)), [["demo"]]);
    }
}
