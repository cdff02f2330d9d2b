//! Container images: one OCI layout, packed as a tar file, with an image a tag. Made without a daemon and without the network.
//!
//! All images share a layer with the binary and links to it; they differ in their entry points. `adit-shell` has a second
//! layer with a shell, for platforms whose pods run one before they stop.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::{Arch, Release, Site, TOOL, names, sums};
use crate::steps::{first_line, run_command};
use crate::workspace::fresh;

/// Neither root nor a user of a node.
pub(super) const USER: u32 = 65532;
/// Where the binary is, and where platforms look for it under which name.
const BINARY: &str = "usr/bin/adit";
const NAMES: &[&str] = &["adit", "proxy-server", "proxy-agent"];
const FOLDERS: &[&str] = &["", "bin/", "usr/bin/"];
/// The shell of Debian's package busybox-static, and what it is called by.
const BUSYBOX: &str = "/usr/bin/busybox";
const APPLETS: &[&str] = &["sh", "sleep"];

/// An image: its tag in the layout, its entry point, and whether it has a shell.
pub(super) struct Image {
    pub(super) tag: &'static str,
    pub(super) entrypoint: &'static str,
    pub(super) has_shell: bool,
}

/// All of them.
pub(super) const IMAGES: &[Image] = &[
    Image {
        tag: "adit",
        entrypoint: "/adit",
        has_shell: false,
    },
    Image {
        tag: "proxy-server",
        entrypoint: "/proxy-server",
        has_shell: false,
    },
    Image {
        tag: "proxy-agent",
        entrypoint: "/proxy-agent",
        has_shell: false,
    },
    Image {
        tag: "adit-shell",
        entrypoint: "/adit",
        has_shell: true,
    },
];

/// What the artefact is called behind version and processor.
pub(super) const ENDING: &str = "-images.tar";

/// Whether an image can be made: there is a shell of the host's processor alone.
pub(super) fn is_made(image: &Image, arch: Arch) -> bool {
    !image.has_shell || arch.is_of_host()
}

/// Whether the shell is missing that one of them has.
pub(super) fn missing() -> Option<String> {
    let told = Command::new("ldd").arg(BUSYBOX).output();
    // It refuses what needs no library.
    let is_static = told.is_ok_and(|told| !told.status.success());
    (!is_static || !Path::new(BUSYBOX).is_file())
        .then(|| format!("no static {BUSYBOX}: install busybox-static"))
}

/// Makes the layout of all images.
///
/// # Errors
/// A file cannot be written, or there is no static shell.
pub(super) fn make(
    site: &Site<'_>,
    release: &Release,
    arch: Arch,
    program: &Path,
    licences: &Path,
) -> anyhow::Result<()> {
    let work = site.work.join("images");
    fresh(&work)?;
    let layout = Layout {
        release,
        arch,
        folder: work.join("layout"),
        work: work.clone(),
    };
    fs::create_dir_all(layout.folder.join("blobs/sha256"))?;
    let base = layout.layer("base", |root| {
        place(program, &root.join(BINARY), 0o755)?;
        place(
            licences,
            &root.join("usr/share/doc/adit/LICENSES.txt"),
            0o644,
        )?;
        for folder in FOLDERS {
            for name in NAMES {
                let link = format!("{folder}{name}");
                if link != BINARY {
                    link_to(root, &link, BINARY)?;
                }
            }
        }
        Ok(())
    })?;
    let mut shell = None;
    let mut manifests = Vec::new();
    for image in IMAGES.iter().filter(|image| is_made(image, arch)) {
        let mut layers = vec![&base];
        if image.has_shell {
            layers.push(match &mut shell {
                Some(layer) => layer,
                empty => empty.insert(layout.layer("shell", busybox)?),
            });
        }
        manifests.push(layout.image(image, &layers)?);
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    });
    fs::write(layout.folder.join("index.json"), index.to_string())?;
    let version = json!({"imageLayoutVersion": "1.0.0"});
    fs::write(layout.folder.join("oci-layout"), version.to_string())?;
    let file = site.out.join(release.name(arch, ENDING));
    pack(&layout.folder, &file, release)?;
    fs::remove_dir_all(&work)?;
    Ok(())
}

/// A layout that is being made.
struct Layout<'a> {
    release: &'a Release,
    arch: Arch,
    folder: PathBuf,
    work: PathBuf,
}

/// A blob of the layout.
struct Blob {
    digest: String,
    bytes: u64,
    /// Digest of the uncompressed form, which layers have.
    uncompressed: String,
}

impl Layout<'_> {
    /// A layer of what `fill` puts into an empty folder.
    fn layer(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<Blob> {
        let root = self.work.join(name);
        fs::create_dir_all(&root)?;
        fill(&root)?;
        let tar = self.work.join(format!("{name}.tar"));
        pack(&root, &tar, self.release)?;
        let uncompressed = sums::of_file(&tar)?;
        let mut gzip = Command::new("gzip");
        run_command(
            gzip.args(["--no-name", "--best", "--force"]).arg(&tar),
            TOOL,
        )?;
        let bytes = fs::read(self.work.join(format!("{name}.tar.gz")))?;
        let mut blob = self.blob(&bytes)?;
        blob.uncompressed = uncompressed;
        Ok(blob)
    }

    fn blob(&self, bytes: &[u8]) -> anyhow::Result<Blob> {
        let digest = sums::of_bytes(bytes);
        fs::write(self.folder.join("blobs/sha256").join(&digest), bytes)?;
        Ok(Blob {
            uncompressed: digest.clone(),
            digest,
            bytes: u64::try_from(bytes.len())?,
        })
    }

    /// Writes configuration and manifest of an image, and returns its entry of the index.
    fn image(&self, image: &Image, layers: &[&Blob]) -> anyhow::Result<Value> {
        let licence = if image.has_shell {
            "Apache-2.0 AND GPL-2.0-only"
        } else {
            "Apache-2.0"
        };
        let labels = json!({
            "org.opencontainers.image.title": image.tag,
            "org.opencontainers.image.version": self.release.version,
            "org.opencontainers.image.revision": self.release.revision,
            "org.opencontainers.image.created": self.release.time,
            "org.opencontainers.image.licenses": licence,
        });
        let diffs: Vec<String> = layers
            .iter()
            .map(|layer| format!("sha256:{}", layer.uncompressed))
            .collect();
        let history: Vec<Value> = layers
            .iter()
            .map(|_| json!({"created": self.release.time, "created_by": "cargo xtask dist"}))
            .collect();
        let config = json!({
            "created": self.release.time,
            "architecture": self.arch.name(),
            "os": "linux",
            "config": {
                "User": format!("{USER}:{USER}"),
                "Env": ["PATH=/usr/bin:/bin"],
                "Entrypoint": [image.entrypoint],
                "WorkingDir": "/",
                "Labels": labels,
            },
            "rootfs": {"type": "layers", "diff_ids": diffs},
            "history": history,
        });
        let config = self.blob(config.to_string().as_bytes())?;
        let layers: Vec<Value> = layers
            .iter()
            .map(|layer| descriptor("layer.v1.tar+gzip", layer))
            .collect();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("config.v1+json", &config),
            "layers": layers,
            "annotations": labels,
        });
        let manifest = self.blob(manifest.to_string().as_bytes())?;
        let mut entry = descriptor("manifest.v1+json", &manifest);
        entry["platform"] = json!({"architecture": self.arch.name(), "os": "linux"});
        entry["annotations"] = json!({"org.opencontainers.image.ref.name": image.tag});
        Ok(entry)
    }
}

fn descriptor(kind: &str, blob: &Blob) -> Value {
    json!({
        "mediaType": format!("application/vnd.oci.image.{kind}"),
        "digest": format!("sha256:{}", blob.digest),
        "size": blob.bytes,
    })
}

/// Copies a file below a root.
pub(super) fn place(from: &Path, to: &Path, mode: u32) -> anyhow::Result<()> {
    let folder = to.parent().context("a file is in a folder")?;
    fs::create_dir_all(folder)?;
    fs::copy(from, to).with_context(|| format!("copy {}", from.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// Links to a file of the same root, by a relative path: it holds wherever the root is mounted.
fn link_to(root: &Path, link: &str, file: &str) -> anyhow::Result<()> {
    let up = "../".repeat(link.matches('/').count());
    let path = root.join(link);
    fs::create_dir_all(path.parent().context("a link is in a folder")?)?;
    symlink(format!("{up}{file}"), &path).with_context(|| format!("link {}", path.display()))
}

fn busybox(root: &Path) -> anyhow::Result<()> {
    place(Path::new(BUSYBOX), &root.join("bin/busybox"), 0o755)?;
    let copyright = Path::new("/usr/share/doc/busybox-static/copyright");
    if copyright.is_file() {
        let to = root.join("usr/share/doc/busybox-static");
        place(copyright, &to.join("copyright"), 0o644)?;
        // Which sources belong to it.
        let mut query = Command::new("dpkg-query");
        query.args([
            "--show",
            "--showformat=${Package} ${Version}",
            "busybox-static",
        ]);
        if let Some(version) = first_line(&mut query) {
            fs::write(to.join("version"), format!("{version}\n"))?;
        }
    }
    for applet in APPLETS {
        link_to(root, &format!("bin/{applet}"), "bin/busybox")?;
    }
    Ok(())
}

/// Packs a folder: the same files give the same bytes, whoever owns them and whenever they were written.
fn pack(folder: &Path, file: &Path, release: &Release) -> anyhow::Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--create", "--format=gnu", "--sort=name", "--file"])
        .arg(file)
        .args(["--owner=0", "--group=0", "--numeric-owner"])
        .args(["--mode=u=rwX,go=rX", &format!("--mtime=@{}", release.epoch)])
        .arg("--directory")
        .arg(folder)
        .args(names(folder)?);
    run_command(&mut tar, TOOL)
}
