//! `cargo xtask dist`: makes the artefacts of a release below `target/dist`, and checks them.
//!
//! Every artefact depends on the commit, the toolchain and the packages of the build machine alone: `--check` makes all of
//! them a second time, from a clone in another folder, and compares them byte by byte.

mod bill;
mod binary;
mod confined;
mod deb;
mod deb_trial;
mod image;
mod image_trial;
mod licences;
mod sums;
mod system;
mod tree;
mod tunnel;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum as _;
use serde::Deserialize;

use crate::steps::{Outcome, Steps, first_line, run_command, seconds};
use crate::workspace::{Workspace, fresh};

pub(crate) use confined::{Args as Confined, run as confine};
pub(crate) use image_trial::{Args as ImageTrial, inside as try_images};
pub(crate) use sums::Key;

/// Longest time for a tool that packs, signs or lists.
pub(crate) const TOOL: Duration = Duration::from_secs(5 * 60);

/// What to make.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also check everything: install the package, run the images, make all of it again elsewhere and compare.
    #[arg(long)]
    check: bool,
    /// Sign SHA256SUMS with this private key: ed25519, PEM.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// For this processor; repeatable.
    #[arg(long, value_name = "ARCH", default_value = "amd64")]
    arch: Vec<Arch>,
    /// Take this `adit` instead of building one, to try out the rest. It is not reproduced.
    #[arg(long, value_name = "FILE", hide = true)]
    binary: Option<PathBuf>,
}

/// A processor that there are artefacts for, by the name that packages and images give it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    /// As packages and images call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// As the kernel and compilers call it.
    fn machine(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// What rustc builds for.
    fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.machine())
    }

    fn is_of_host(self) -> bool {
        std::env::consts::ARCH == self.machine()
    }

    /// The host's, if there are artefacts for it.
    pub(crate) fn of_host() -> Option<Self> {
        let mut all = Self::value_variants().iter().copied();
        all.find(|arch| arch.is_of_host())
    }

    /// A tool of the C toolchain for it, such as `gcc`.
    fn tool(self, name: &str) -> String {
        if self.is_of_host() {
            name.to_owned()
        } else {
            format!("{}-linux-gnu-{name}", self.machine())
        }
    }

    /// Runs a program that was built for it.
    fn run(self, program: &Path) -> Command {
        let Some(emulator) = self.emulator() else {
            return Command::new(program);
        };
        let mut command = Command::new(emulator);
        command.arg(program);
        command
    }

    /// What runs programs of another processor than the host's.
    fn emulator(self) -> Option<String> {
        (!self.is_of_host()).then(|| format!("qemu-{}-static", self.machine()))
    }
}

/// What all artefacts of a release say of themselves.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) version: String,
    /// Full hash of the commit.
    revision: String,
    /// The hash and the day of the commit as `adit version` prints them.
    commit: String,
    day: String,
    /// Time of the commit, in seconds since 1970 and by RFC 3339: no artefact has another time.
    epoch: i64,
    time: String,
}

impl Release {
    /// Of the commit that is checked out.
    ///
    /// # Errors
    /// There is no git repository, or no version in the manifest.
    pub(crate) fn of(workspace: &Workspace) -> anyhow::Result<Self> {
        let manifest = workspace.text("Cargo.toml")?.unwrap_or_default();
        let manifest: toml::Table = toml::from_str(&manifest)?;
        let package = manifest
            .get("workspace")
            .and_then(|table| table.get("package"));
        let version = package.and_then(|table| table.get("version"));
        let version = version.and_then(|version| version.as_str());
        let told = workspace.git(&["log", "-1", "--abbrev=12", "--format=%H %h %cs %ct"])?;
        let [revision, commit, day, epoch] = told
            .split(' ')
            .collect::<Vec<_>>()
            .try_into()
            .map_err(|_other| anyhow::anyhow!("git describes the commit as {told:?}"))?;
        let epoch: i64 = epoch.parse()?;
        Ok(Self {
            version: version
                .context("Cargo.toml has no workspace.package.version")?
                .to_owned(),
            revision: revision.to_owned(),
            commit: commit.to_owned(),
            day: day.to_owned(),
            epoch,
            time: rfc3339(epoch)?,
        })
    }

    /// Name of an artefact, by what follows version and processor.
    fn name(&self, arch: Arch, ending: &str) -> String {
        format!("adit-{}-linux-{}{ending}", self.version, arch.name())
    }
}

fn rfc3339(epoch: i64) -> anyhow::Result<String> {
    let mut date = Command::new("date");
    date.args([
        "--utc",
        "--date",
        &format!("@{epoch}"),
        "+%Y-%m-%dT%H:%M:%SZ",
    ]);
    first_line(&mut date).context("`date` of coreutils does not tell the time of the commit")
}

/// Where artefacts are made of which sources.
struct Site<'a> {
    sources: &'a Workspace,
    /// Cargo's target folder.
    build: PathBuf,
    /// Where artefacts go.
    out: PathBuf,
    /// Where everything else goes.
    work: PathBuf,
}

/// Makes them, prints a table, and checks them if asked to.
///
/// # Errors
/// Something does not build, a tool is missing, or a check fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    run_and_reproduce(workspace, args, &args.arch)
}

/// As [`run`]; a check makes the artefacts for the processors `again` a second time.
fn run_and_reproduce(workspace: &Workspace, args: &Args, again: &[Arch]) -> anyhow::Result<()> {
    let (out, work) = (
        workspace.target().join("dist"),
        workspace.target().join("dist-work"),
    );
    let release = Release::of(workspace)?;
    if let Some(why) = missing(workspace, &args.arch) {
        bail!("{why}");
    }
    let (started, site) = (Instant::now(), Site::at(workspace, &out, &work)?);
    site.make(&release, &args.arch, args.binary.as_deref())?;
    sums::write(&site.out)?;
    if let Some(key) = &args.key {
        sums::sign(&site.out, &Key::of(key))?;
    }
    print_table(&site.out)?;
    println!("dist: made in {}", seconds(started.elapsed()));
    if args.check {
        check(workspace, &release, &site, args, again)?;
    }
    Ok(())
}

/// Makes the artefacts of a release in a folder, without sums.
///
/// # Errors
/// As [`run`].
pub(crate) fn make(
    workspace: &Workspace,
    release: &Release,
    archs: &[Arch],
    out: &Path,
) -> anyhow::Result<()> {
    if let Some(why) = missing(workspace, archs) {
        bail!("{why}");
    }
    let work = workspace.target().join("dist-work");
    Site::at(workspace, out, &work)?.make(release, archs, None)
}

/// Writes sums and signature over a folder of artefacts, and verifies both.
///
/// # Errors
/// The key is not of ed25519, or what was written is refused.
pub(crate) fn sign(out: &Path, key: &Key, scratch: &Path) -> anyhow::Result<()> {
    sums::write(out)?;
    sums::sign(out, key)?;
    let public = scratch.join("public.pem");
    key.public(&public)?;
    sums::verify(out, &public)
}

/// The step of the night, for each processor whose tools are installed. Only the host's artefacts are built a second time, because
/// the night has no time for more.
///
/// # Errors
/// As [`run`].
pub(crate) fn night(workspace: &Workspace) -> anyhow::Result<Outcome> {
    if let Some(why) = missing_for_check() {
        return Ok(Outcome::Skipped(why));
    }
    let (mut arch, mut skipped) = (Vec::new(), Vec::new());
    for &one in Arch::value_variants() {
        match missing(workspace, &[one]) {
            None => arch.push(one),
            Some(why) => skipped.push(format!("for {}: {why}", one.name())),
        }
    }
    if arch.is_empty() {
        return Ok(Outcome::Skipped(skipped.join("; ")));
    }
    let args = Args {
        check: true,
        key: None,
        arch,
        binary: None,
    };
    let host: Vec<Arch> = args
        .arch
        .iter()
        .copied()
        .filter(|arch| arch.is_of_host())
        .collect();
    run_and_reproduce(workspace, &args, &host)?;
    Ok(if skipped.is_empty() {
        Outcome::Done
    } else {
        Outcome::Skipped(format!("{}; the rest passed", skipped.join("; ")))
    })
}

impl<'a> Site<'a> {
    /// Artefacts of an earlier run go, what cargo built stays.
    fn at(sources: &'a Workspace, out: &Path, work: &Path) -> anyhow::Result<Self> {
        fresh(out)?;
        let build = work.join("build");
        fs::create_dir_all(&build).with_context(|| format!("create {}", build.display()))?;
        Ok(Self {
            sources,
            build,
            out: out.to_path_buf(),
            work: work.to_path_buf(),
        })
    }

    fn make(&self, release: &Release, archs: &[Arch], binary: Option<&Path>) -> anyhow::Result<()> {
        for &arch in archs {
            let crates = tree::Crates::linked(self.sources, arch)?;
            let libraries = system::libraries(self.sources, arch)?;
            let whole = match binary {
                Some(binary) => binary.to_path_buf(),
                None => binary::build(self, release, arch, &crates)?,
            };
            let program = binary::split(self, release, arch, &whole)?;
            fs::write(
                self.out.join(release.name(arch, ".cdx.json")),
                bill::of(release, arch, &program, &crates, &libraries)?,
            )?;
            let licences = self.out.join(release.name(arch, ".LICENSES.txt"));
            fs::write(&licences, licences::of(self.sources, &crates, &libraries)?)?;
            image::make(self, release, arch, &program, &licences)?;
            deb::make(self, release, arch, &program, &licences)?;
        }
        Ok(())
    }
}

/// What is missing here to make artefacts.
fn missing(workspace: &Workspace, archs: &[Arch]) -> Option<String> {
    let mut tools = vec![
        "dpkg-deb".to_owned(),
        "gzip".to_owned(),
        "openssl".to_owned(),
        "tar".to_owned(),
    ];
    tools.extend(archs.iter().map(|arch| arch.tool("objcopy")));
    tools.extend(archs.iter().map(|arch| arch.tool("gcc")));
    tools.extend(archs.iter().filter_map(|arch| arch.emulator()));
    let library = || archs.iter().find_map(|arch| no_library(workspace, *arch));
    let c_library = || archs.iter().find_map(|arch| no_c_library(*arch));
    lacking(&tools)
        .or_else(library)
        .or_else(c_library)
        .or_else(image::missing)
}

/// Whether the static C library is missing for a processor, and which package of Debian has it.
fn no_c_library(arch: Arch) -> Option<String> {
    let file = first_line(Command::new(arch.tool("gcc")).arg("-print-file-name=libc.a"));
    // gcc repeats the name of a file that it does not find.
    if file.is_some_and(|file| Path::new(&file).is_absolute()) {
        return None;
    }
    let package = if arch.is_of_host() {
        "libc6-dev".to_owned()
    } else {
        format!("libc6-dev-{}-cross", arch.name())
    };
    Some(format!("no static C library: apt install {package}"))
}

/// Whether Rust's own library is missing for a processor, and what installs it.
fn no_library(workspace: &Workspace, arch: Arch) -> Option<String> {
    let triple = arch.triple();
    let mut rustc = workspace.command("rustc");
    let folder = first_line(rustc.args(["--print", "target-libdir", "--target", &triple]));
    let is_there = folder.is_some_and(|folder| Path::new(&folder).is_dir());
    (!is_there).then(|| format!("no library of Rust: rustup target add {triple}"))
}

/// What is missing here to check them.
fn missing_for_check() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("images and packages are tried as root".to_owned());
    }
    lacking(&["umoci", "unshare", "debootstrap", "chroot"].map(str::to_owned))
}

fn lacking(tools: &[String]) -> Option<String> {
    let lacking: Vec<&str> = tools
        .iter()
        .filter(|tool| tool_path(tool).is_none())
        .map(String::as_str)
        .collect();
    (!lacking.is_empty()).then(|| format!("not installed: {}", lacking.join(", ")))
}

/// Where a tool is.
fn tool_path(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join(tool))
        .find(|file| file.is_file())
}

/// Name and size of each artefact.
pub(crate) fn print_table(out: &Path) -> anyhow::Result<()> {
    let names = names(out)?;
    let width = names.iter().map(String::len).max().unwrap_or_default();
    for name in names {
        let bytes = fs::metadata(out.join(&name))?.len();
        println!("  {name:<width$}  {:>10} KiB", bytes.div_ceil(1024));
    }
    Ok(())
}

/// Names of the files in a folder, sorted.
fn names(folder: &Path) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// All checks; the long build comes last.
fn check(
    workspace: &Workspace,
    release: &Release,
    site: &Site<'_>,
    args: &Args,
    again: &[Arch],
) -> anyhow::Result<()> {
    if let Some(why) = missing_for_check() {
        bail!("{why}");
    }
    let (out, trial) = (&site.out, site.work.join("trial"));
    fs::create_dir_all(&trial)?;
    let mut steps = Steps::new();
    steps.run("sums and signature", || sums::check(out, &trial));
    for &arch in &args.arch {
        let name = |what| format!("{what} for {}", arch.name());
        let program = out.join(release.name(arch, ""));
        steps.run(&name("tunnel"), || tunnel::plain(arch, &program, &trial));
        steps.run(&name("images"), || {
            image_trial::run(workspace, release, arch, out, &trial)
        });
        steps.run_if_possible(&name("package"), || {
            deb_trial::run(workspace, release, arch, out, &trial)
        });
    }
    if args.binary.is_none() && !again.is_empty() {
        steps.run("the same from a clone", || {
            reproduce(workspace, release, site, again)
        });
    }
    steps.finish()
}

/// Makes all artefacts again, from a clone in another folder.
fn reproduce(
    workspace: &Workspace,
    release: &Release,
    first: &Site<'_>,
    archs: &[Arch],
) -> anyhow::Result<()> {
    let changes = workspace.git(&["status", "--porcelain", "--untracked-files=no"])?;
    ensure!(
        changes.is_empty(),
        "a clone has what is committed: commit these changes first:\n{changes}"
    );
    // Not as long as the first folder either: lengths of paths are seen in some formats.
    let again = first.work.join("in-another-folder");
    fresh(&again)?;
    let clone = again.join("sources");
    let mut git = workspace.command("git");
    git.args(["clone", "--quiet", "--no-hardlinks", "."])
        .arg(&clone);
    run_command(&mut git, TOOL)?;
    let sources = Workspace::at(&clone);
    let second = Site::at(&sources, &again.join("out"), &again.join("work"))?;
    second.make(release, archs, None)?;
    let is_made_again = |name: &String| {
        let mut archs = archs.iter();
        archs.any(|arch| name.starts_with(&release.name(*arch, "")))
    };
    for name in names(&first.out)?.into_iter().filter(is_made_again) {
        let (one, other) = (first.out.join(&name), second.out.join(&name));
        ensure!(
            sums::of_file(&one)? == sums::of_file(&other)?,
            "{} and {} differ: compare them with diffoscope",
            one.display(),
            other.display()
        );
    }
    fs::remove_dir_all(&again)?;
    Ok(())
}

/// A package as `cargo metadata` describes it.
#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    description: Option<String>,
    repository: Option<String>,
    source: Option<String>,
    manifest_path: PathBuf,
    features: std::collections::BTreeMap<String, Vec<String>>,
}
