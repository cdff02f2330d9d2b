//! `cargo xtask pages`: the commands of install pages, run as they stand there in a blank Debian.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use crate::debian;
use crate::dist::{self, Arch, Key};
use crate::steps::{Outcome, run_command};
use crate::workspace::Workspace;

/// A page with commands for one machine.
struct Page {
    file: &'static str,
    start: Start,
    /// Debian packages that its reader has.
    packages: &'static [&'static str],
    /// Commands around those of the page: what its reader has beside this machine, and what is to come of it.
    before: &'static str,
    after: &'static str,
}

const PAGES: &[Page] = &[
    Page::with("docs/getting-started.md", Start::Program),
    Page::with("docs/install/systemd.md", Start::Package),
    Page::with("docs/install/static-pod.md", Start::Program),
    Page {
        packages: &[
            "ca-certificates",
            "docker-registry",
            // For skopeo: debootstrap does not resolve what several packages provide.
            "netavark",
            "openssl",
            "skopeo",
            "umoci",
        ],
        before: REGISTRY,
        after: PULLED,
        ..Page::with("docs/install/images.md", Start::Release)
    },
];

/// What a reader has when he begins: artefacts in the folder where the commands start, or the program.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// `adit` on the path.
    Program,
    /// The Debian package in the folder.
    Package,
    /// All artefacts, their signature, and the public key.
    Release,
}

/// A registry that `skopeo` trusts.
const REGISTRY: &str = "echo '127.0.0.1 registry.example.org' >>/etc/hosts
trusted=/etc/containers/certs.d/registry.example.org
mkdir --parents $trusted
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=registry \\
  -addext subjectAltName=DNS:registry.example.org -keyout /srv/registry.key -out $trusted/ca.crt
cat >/srv/registry.yml <<END
version: 0.1
storage: {filesystem: {rootdirectory: /srv/registry}}
http: {addr: '127.0.0.1:443', tls: {certificate: $trusted/ca.crt, key: /srv/registry.key}}
END
docker-registry serve /srv/registry.yml &
curl --silent --show-error --retry 60 --retry-delay 1 --retry-connrefused --cacert $trusted/ca.crt https://registry.example.org/v2/";

/// The image is in the registry and runs. The package is installed, and its services are off.
const PULLED: &str =
    "skopeo copy docker://registry.example.org/proxy-agent:v0.1.0 oci:/srv/pulled:agent
umoci unpack --image /srv/pulled:agent /srv/bundle
grep --quiet '\"/proxy-agent\"' /srv/bundle/config.json
chroot --userspec=65532:65532 /srv/bundle/rootfs /adit version
adit version
for unit in adit-server adit-agent; do test \"$(systemctl is-enabled $unit)\" = disabled; done";

/// Longest time to run a page.
const RUN: Duration = Duration::from_secs(5 * 60);
/// The units are sound, and exposed by less than 2.5 of 10.
const UNITS: &str = "cd /lib/systemd/system\nsystemd-analyze verify --man=no adit-server.service adit-agent.service adit-server.socket\n\
                     for unit in adit-server adit-agent; do systemd-analyze security --offline=true --threshold=25 $unit.service; done\n\
                     cd /srv/page";
/// Where a page runs, in its machine.
const FOLDER: &str = "srv/page";

/// Runs the pages, each in a machine of its own.
///
/// # Errors
/// A command of a page fails, or a page has none.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<Outcome> {
    for program in ["debootstrap", "systemd-nspawn"] {
        if Command::new(program).arg("--version").output().is_err() {
            return Ok(Outcome::Skipped(format!("{program} is not installed")));
        }
    }
    let Some(package) = package(workspace)? else {
        return Ok(Outcome::Skipped(
            "target/dist has no package of this processor: run cargo xtask dist first".to_owned(),
        ));
    };
    for page in PAGES {
        let file = page.file;
        let text = workspace
            .text(file)?
            .with_context(|| format!("no page {file}"))?;
        let blocks = blocks(&text);
        ensure!(!blocks.is_empty(), "{file} has no commands");
        println!("pages: {file}, {} blocks", blocks.len());
        let name = Path::new(file).file_stem().unwrap_or_default();
        let machine = workspace.target().join("pages").join(name);
        debian::install(workspace, page.packages, &machine)?;
        prepare(&machine, &blocks, page, &package).with_context(|| file.to_owned())?;
        boot(&machine).with_context(|| file.to_owned())?;
        fs::remove_dir_all(&machine)?;
    }
    Ok(Outcome::Done)
}

impl Page {
    /// One that takes no further packages for granted.
    const fn with(file: &'static str, start: Start) -> Self {
        Self {
            file,
            start,
            packages: &[],
            before: "",
            after: "",
        }
    }
}

/// How a block is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    /// To its end.
    Foreground,
    /// In a terminal of its own, as long as the page lasts.
    Background,
}

/// The blocks of a page that are marked `sh`, or `sh background`. `sh elsewhere` is for other machines.
fn blocks(text: &str) -> Vec<(How, String)> {
    let mut found = Vec::new();
    let mut open: Option<(Option<How>, String)> = None;
    for line in text.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(kind)) => {
                let how = match kind.trim() {
                    "sh" => Some(How::Foreground),
                    "sh background" => Some(How::Background),
                    _ => None,
                };
                open = Some((how, String::new()));
            }
            (Some(_), Some(_)) => {
                if let Some((Some(how), block)) = open.take() {
                    found.push((how, block));
                }
            }
            (Some((_, block)), None) => {
                block.push_str(line);
                block.push('\n');
            }
            (None, None) => (),
        }
    }
    found
}

/// The package that `cargo xtask dist` made for this processor, if it is the one that the pages name.
fn package(workspace: &Workspace) -> anyhow::Result<Option<PathBuf>> {
    let folder = workspace.target().join("dist");
    let Some(arch) = Arch::of_host().filter(|arch| *arch == Arch::Amd64 && folder.exists()) else {
        return Ok(None);
    };
    let ending = format!("-{}.deb", arch.name());
    for file in fs::read_dir(&folder)? {
        let path = file?.path();
        if path.to_string_lossy().ends_with(&ending) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Copies all artefacts and signs them with a key of its own.
fn release(from: &Path, to: &Path) -> anyhow::Result<()> {
    for file in fs::read_dir(from)? {
        let file = file?;
        fs::copy(file.path(), to.join(file.file_name()))?;
    }
    let scratch = tempfile::tempdir()?;
    let key = Key::throwaway(scratch.path())?;
    dist::sign(to, &key, scratch.path())?;
    key.public(&to.join("adit-release.pub"))
}

/// Puts the commands into the machine, with a service that runs them and ends the machine.
fn prepare(
    machine: &Path,
    blocks: &[(How, String)],
    page: &Page,
    package: &Path,
) -> anyhow::Result<()> {
    let folder = machine.join(FOLDER);
    fs::create_dir_all(&folder)?;
    let name = package.file_name().context("a package has a name")?;
    if page.start == Start::Release {
        release(
            package.parent().context("a package is in a folder")?,
            &folder,
        )?;
    } else {
        fs::copy(package, folder.join(name))?;
    }
    let mut script = String::from("cd /srv/page\npwd >cwd\n");
    if page.start == Start::Program {
        let _infallible = writeln!(script, "dpkg --install ./{}\n{UNITS}", name.display());
    }
    let _infallible = writeln!(script, "{}", page.before);
    let mut is_served = false;
    for (number, (how, block)) in blocks.iter().enumerate() {
        let file = format!("{number:02}.sh");
        let text = format!("set -x\ncd \"$(cat /srv/page/cwd)\"\n{block}\npwd >/srv/page/cwd\n");
        fs::write(folder.join(&file), text)?;
        let run = format!("bash -euo pipefail /srv/page/{file}");
        let line = match how {
            How::Background => {
                is_served = true;
                format!("{run} &")
            }
            // What runs in the background takes a moment to listen.
            How::Foreground if is_served => {
                format!("for try in $(seq 40); do {run} && break; test $try != 40; sleep 0.5; done")
            }
            How::Foreground => run,
        };
        let _infallible = writeln!(script, "echo '--- block {number}'\n{line}");
    }
    let _infallible = writeln!(script, "{}\necho 0 >/srv/page/rc", page.after);
    fs::write(folder.join("run.sh"), script)?;
    let unit = "[Unit]\nAfter=network.target dbus.service\n[Service]\nType=oneshot\nEnvironment=HOME=/srv/page DEBIAN_FRONTEND=noninteractive\n\
                ExecStart=/bin/bash -c 'exec bash -euo pipefail /srv/page/run.sh >/srv/page/log 2>&1'\n\
                ExecStopPost=/bin/systemctl poweroff --force --no-block\n[Install]\nWantedBy=multi-user.target\n";
    fs::write(machine.join("etc/systemd/system/page.service"), unit)?;
    let wants = machine.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants)?;
    std::os::unix::fs::symlink("../page.service", wants.join("page.service"))?;
    Ok(())
}

fn boot(machine: &Path) -> anyhow::Result<()> {
    let mut nspawn = Command::new("systemd-nspawn");
    nspawn
        .args([
            "--quiet",
            "--boot",
            "--register=no",
            "--keep-unit",
            "--console=pipe",
        ])
        .args(["--private-network", "--directory"])
        .arg(machine);
    let booted = run_command(&mut nspawn, RUN);
    let folder = machine.join(FOLDER);
    let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
    if fs::read_to_string(folder.join("rc")).is_ok_and(|code| code.trim() == "0") {
        return Ok(());
    }
    let tail: Vec<&str> = log.lines().rev().take(30).collect();
    let tail: Vec<&str> = tail.into_iter().rev().collect();
    booted?;
    bail!("a command fails:\n{}", tail.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_for_this_machine_are_found_in_order() {
        let page = "a\n```sh\none\ntwo\n```\n```sh background\nthree\n```\n```text\nno\n```\n```sh elsewhere\nno\n```\n";
        let expected = [
            (How::Foreground, "one\ntwo\n".to_owned()),
            (How::Background, "three\n".to_owned()),
        ];
        assert_eq!(blocks(page), expected);
    }
}
