// Streams an answer: node stream.js PROMPT [ADDRESS]
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [prompt, address = "127.0.0.1:50051"] = process.argv.slice(2);
const { WHIPPET_TOKEN: token, WHIPPET_CA: ca } = process.env;

const definition = loader.loadSync("whippet/v1/generation.proto", {
  includeDirs: [path.join(__dirname, "..", "..", "protos")],
  longs: String,
  enums: String,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).whippet.v1;

// UNAVAILABLE is tried again: when the server says, or else backing off, and never once an answer has begun.
const serviceConfig = {
  loadBalancingConfig: [{ round_robin: {} }],
  methodConfig: [
    {
      name: [{ service: "whippet.v1.GenerationService" }],
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: "0.2s",
        maxBackoff: "5s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
};
const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
const client = new GenerationService(address, credentials, {
  "grpc.service_config": JSON.stringify(serviceConfig),
  "grpc.keepalive_time_ms": 30_000,
});

const metadata = new grpc.Metadata();
if (token) metadata.set("authorization", `Bearer ${token}`);

const request = { text: prompt, stopping: { maxTokens: 64 }, sampling: { temperature: 0 } };
const call = client.generateStream(request, metadata, { deadline: Date.now() + 60_000 });
let cancelled = false;
process.once("SIGINT", () => {
  cancelled = true;
  call.cancel(); // the server stops generating
});

call.on("data", (message) => {
  process.stdout.write(message.text ?? "");
  if (message.finish) console.error(`\n${message.finish.usage.completionTokens} tokens`);
});
call.on("error", (error) => {
  if (!cancelled) {
    const [later] = error.metadata.get("grpc-retry-pushback-ms");
    console.error(`\n${grpc.status[error.code]}: ${error.details}${later ? `; try again in ${later} ms` : ""}`);
    process.exitCode = 1;
  }
  client.close();
});
call.on("end", () => client.close());
