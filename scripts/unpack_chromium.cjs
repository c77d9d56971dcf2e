// Unpacks the npm package @sparticuz/chromium into a folder: node scripts/unpack_chromium.cjs PACKAGE INTO
"use strict";
const { createHash } = require("crypto");
const { execFileSync } = require("child_process");
const { mkdirSync, readFileSync, rmSync, writeFileSync } = require("fs");
const { join } = require("path");
const { brotliDecompressSync } = require("zlib");

const PARTS = { // what version 153.0.0 holds, with SHA-256
  "chromium.br": "38e1e1649db20fa4ea644bf5987688ce81a4c9eb10e7eae8380b74fc0d699fea",
  "al2023.tar.br": "a166168dd3e3e9d8743689fff543c5cadb3025c1816c6a154c90dc68a59edd0a",
  "fonts.tar.br": "c1307fe5cd607092f0426742b4ab93755eec9a9b7752e47c56408c2bcf3e515b",
  "swiftshader.tar.br": "b680e40a33235ecc6ad4c6897a168b70ce5164f0d62d2a64d675320d51614631",
};
const [, , source, into] = process.argv;

mkdirSync(into, { recursive: true });
for (const [name, expected] of Object.entries(PARTS)) {
  const packed = readFileSync(join(source, "bin", name));
  const found = createHash("sha256").update(packed).digest("hex");
  if (found !== expected) throw new Error(`${name} is not what it was: ${found}`);
  const path = join(into, name.slice(0, -".br".length));
  writeFileSync(path, brotliDecompressSync(packed), { mode: 0o755 });
  if (path.endsWith(".tar")) {
    execFileSync("tar", ["-xf", path, "-C", into, "--no-same-owner"]);
    rmSync(path);
  }
}
