//! `cargo xtask dist`: makes the artefacts of a release below `target/dist`, and checks them. Scripts pack and try them; this
//! program knows what is linked.
//!
//! Every artefact depends on the commit, the toolchain and the packages of the build machine alone: `--check` makes all of
//! them a second time, from a clone in another folder, and compares them byte by byte.

mod bill;
mod confined;
mod image_trial;
mod licences;
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

use crate::script;
use crate::steps::{Outcome, Steps, lacking, run_command, seconds, stdout_of};
use crate::workspace::{Workspace, fresh};

pub(crate) use confined::{Args as Confined, run as confine};
pub(crate) use image_trial::{Args as ImageTrial, inside as try_images};

/// Longest time for a tool that packs, signs or lists.
const TOOL: Duration = Duration::from_secs(5 * 60);
/// Longest time for a build from nothing.
const BUILD: Duration = Duration::from_secs(60 * 60);
/// What these artefacts are called behind version and processor.
const IMAGES: &str = "-images.tar";
const DEB: &str = ".deb";
/// Addresses of the workspace, which this package has too.
const HOMEPAGE: &str = env!("CARGO_PKG_HOMEPAGE");
const REPOSITORY: &str = env!("CARGO_PKG_REPOSITORY");
/// Neither root nor a user of a node: who runs in an image.
const USER: u32 = 65532;

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
    fn name(self) -> &'static str {
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

    /// What names of tools of its C toolchain begin with, such as `gcc`.
    fn cross(self) -> String {
        if self.is_of_host() {
            String::new()
        } else {
            format!("{}-linux-gnu-", self.machine())
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

    /// A script, with what scripts are told of a processor.
    fn script(self, workspace: &Workspace, name: &str) -> Command {
        let mut command = script::command(workspace, name);
        command
            .env("ARCH", self.name())
            .env("TRIPLE", self.triple())
            .env("CROSS", self.cross())
            .env("EMULATOR", self.emulator().unwrap_or_default())
            .env("USER_ID", USER.to_string());
        command
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
    epoch: String,
    time: String,
}

impl Release {
    /// Of the commit that is checked out.
    ///
    /// # Errors
    /// There is no git repository.
    pub(crate) fn of(workspace: &Workspace) -> anyhow::Result<Self> {
        let mut git = workspace.command("git");
        git.args(["log", "-1", "--abbrev=12", "--format=%H %h %cs %ct %cd"]);
        git.arg("--date=format-local:%Y-%m-%dT%H:%M:%SZ")
            .env("TZ", "UTC");
        let told = stdout_of(&mut git, TOOL)?;
        let words: Vec<&str> = told.split_whitespace().collect();
        let [revision, commit, day, epoch, time] = words[..] else {
            bail!("git describes the commit as {told:?}");
        };
        Ok(Self {
            // This package has the version of the workspace.
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: revision.to_owned(),
            commit: commit.to_owned(),
            day: day.to_owned(),
            epoch: epoch.to_owned(),
            time: time.to_owned(),
        })
    }

    /// Name of an artefact, by what follows version and processor.
    fn name(&self, arch: Arch, ending: &str) -> String {
        format!("adit-{}-linux-{}{ending}", self.version, arch.name())
    }
}

/// Where artefacts are made of which sources.
struct Site<'a> {
    sources: &'a Workspace,
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
    let (started, release) = (Instant::now(), Release::of(workspace)?);
    let site = Site::at(workspace, &workspace.target().join("dist"), &args.arch)?;
    site.make(&release, &args.arch, args.binary.as_deref())?;
    sums(workspace, &site.out, &["list"])?;
    if let Some(key) = &args.key {
        sums(workspace, &site.out, &["sign", absolute(key)?.as_str()])?;
    }
    print_table(&site.out)?;
    println!("dist: made in {}", seconds(started.elapsed()));
    if args.check {
        check(&release, &site, args, again)?;
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
    Site::at(workspace, out, archs)?.make(release, archs, None)
}

/// Writes sums and signature over a folder of artefacts, and verifies both. Without a key a throwaway one signs.
///
/// # Errors
/// The key is not of ed25519, or what was written is refused.
pub(crate) fn sign(workspace: &Workspace, out: &Path, key: Option<&Path>) -> anyhow::Result<()> {
    let key = key.map_or(Ok(String::new()), absolute)?;
    sums(workspace, out, &["list"])?;
    sums(workspace, out, &["sign", &key])
}

fn sums(workspace: &Workspace, folder: &Path, args: &[&str]) -> anyhow::Result<()> {
    run_command(
        script::command(workspace, "sums").arg(folder).args(args),
        TOOL,
    )
}

/// The path for a script, which has another working folder.
fn absolute(path: &Path) -> anyhow::Result<String> {
    let path = fs::canonicalize(path).with_context(|| format!("find {}", path.display()))?;
    Ok(path.to_str().context("a path of UTF-8")?.to_owned())
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
        match script::outcome(&mut one.script(workspace, "dist-tools"))? {
            Outcome::Done => arch.push(one),
            Outcome::Skipped(why) => skipped.push(format!("for {}: {why}", one.name())),
        }
    }
    if arch.is_empty() {
        return Ok(Outcome::Skipped(skipped.join("; ")));
    }
    let host: Vec<Arch> = arch
        .iter()
        .copied()
        .filter(|arch| arch.is_of_host())
        .collect();
    let args = Args {
        check: true,
        key: None,
        arch,
        binary: None,
    };
    run_and_reproduce(workspace, &args, &host)?;
    Ok(if skipped.is_empty() {
        Outcome::Done
    } else {
        Outcome::Skipped(format!("{}; the rest passed", skipped.join("; ")))
    })
}

impl<'a> Site<'a> {
    /// Artefacts of an earlier run go, what cargo built stays.
    fn at(sources: &'a Workspace, out: &Path, archs: &[Arch]) -> anyhow::Result<Self> {
        for arch in archs {
            script::outcome(&mut arch.script(sources, "dist-tools"))?.expect_done()?;
        }
        fresh(out)?;
        let work = out.with_file_name("dist-work");
        fs::create_dir_all(&work).with_context(|| format!("create {}", work.display()))?;
        Ok(Self {
            sources,
            out: out.to_path_buf(),
            work,
        })
    }

    fn make(&self, release: &Release, archs: &[Arch], binary: Option<&Path>) -> anyhow::Result<()> {
        for &arch in archs {
            let crates = tree::Crates::linked(self.sources, arch)?;
            let libraries = system::libraries(self.sources, arch)?;
            let registries: Vec<_> = crates
                .registries
                .iter()
                .map(|it| it.to_string_lossy())
                .collect();
            let mut build = self.script("binary", release, arch);
            build
                .arg(self.work.join("build"))
                .arg(&self.out)
                .arg(release.name(arch, ""));
            build.args(binary.map(absolute).transpose()?);
            build
                .env("FEATURES", crates.features.join(","))
                .env("REGISTRIES", registries.join(" "));
            run_command(&mut build, BUILD)?;
            let program = self.out.join(release.name(arch, ""));
            fs::write(
                self.out.join(release.name(arch, ".cdx.json")),
                bill::of(release, arch, &program, &crates, &libraries)?,
            )?;
            let licences = self.out.join(release.name(arch, ".LICENSES.txt"));
            fs::write(&licences, licences::of(self.sources, &crates, &libraries)?)?;
            for (script, ending) in [("images", IMAGES), ("deb", DEB)] {
                let mut pack = self.script(script, release, arch);
                pack.args([&program, &licences])
                    .arg(self.out.join(release.name(arch, ending)));
                run_command(&mut pack, TOOL)?;
            }
        }
        Ok(())
    }

    /// A script that makes or tries an artefact, with all that scripts are told of a release.
    fn script(&self, name: &str, release: &Release, arch: Arch) -> Command {
        let mut command = arch.script(self.sources, name);
        command
            .env("VERSION", &release.version)
            .env("REVISION", &release.revision)
            .env("COMMIT", &release.commit)
            .env("DAY", &release.day)
            .env("EPOCH", &release.epoch)
            .env("TIME", &release.time)
            .env("HOMEPAGE", HOMEPAGE)
            .env("REPOSITORY", REPOSITORY);
        command
    }
}

/// What is missing here to check them.
fn missing_for_check() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("images and packages are tried as root".to_owned());
    }
    lacking(&["umoci", "unshare", "debootstrap", "chroot"])
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
fn check(release: &Release, site: &Site<'_>, args: &Args, again: &[Arch]) -> anyhow::Result<()> {
    if let Some(why) = missing_for_check() {
        bail!("{why}");
    }
    let (out, trial) = (&site.out, site.work.join("trial"));
    fs::create_dir_all(&trial)?;
    let mut steps = Steps::new();
    steps.run("sums and signature", || sums(site.sources, out, &["try"]));
    for &arch in &args.arch {
        let name = |what| format!("{what} for {}", arch.name());
        let program = out.join(release.name(arch, ""));
        steps.run(&name("tunnel"), || tunnel::plain(arch, &program, &trial));
        steps.run(&name("images"), || {
            image_trial::run(site, release, arch, &trial)
        });
        let mut package = site.script("deb-trial", release, arch);
        package
            .arg(out.join(release.name(arch, DEB)))
            .arg(trial.join("debian"));
        steps.run_if_possible(&name("package"), || script::outcome(&mut package));
    }
    if args.binary.is_none() && !again.is_empty() {
        steps.run("the same from a clone", || reproduce(release, site, again));
    }
    steps.finish()
}

/// Makes all artefacts again, from a clone in another folder.
fn reproduce(release: &Release, first: &Site<'_>, archs: &[Arch]) -> anyhow::Result<()> {
    let changes = first
        .sources
        .git(&["status", "--porcelain", "--untracked-files=no"])?;
    ensure!(
        changes.is_empty(),
        "a clone has what is committed: commit these changes first:\n{changes}"
    );
    // Not as long as the first folder either: lengths of paths are seen in some formats.
    let again = first.work.join("in-another-folder");
    fresh(&again)?;
    let clone = again.join("sources");
    let mut git = first.sources.command("git");
    git.args(["clone", "--quiet", "--no-hardlinks", "."])
        .arg(&clone);
    run_command(&mut git, TOOL)?;
    let sources = Workspace::at(&clone);
    let second = Site::at(&sources, &again.join("out"), archs)?;
    second.make(release, archs, None)?;
    let is_made_again = |name: &String| {
        let mut archs = archs.iter();
        archs.any(|arch| name.starts_with(&release.name(*arch, "")))
    };
    for name in names(&first.out)?.into_iter().filter(is_made_again) {
        let (one, other) = (first.out.join(&name), second.out.join(&name));
        ensure!(
            fs::read(&one)? == fs::read(&other)?,
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
