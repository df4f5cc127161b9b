// Runs a handler of Node.js below a worker: `node bootstrap.mjs FILE:EXPORT`. It speaks AWS Lambda's Runtime API (2018-06-01), which the
// worker serves at AWS_LAMBDA_RUNTIME_API. No package is needed; what the handler imports is found beside the handler.
import http from "node:http";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [host, port] = process.env.AWS_LAMBDA_RUNTIME_API.split(":");
const agent = new http.Agent({ keepAlive: true });

// fetch() would give up a request that waits for longer than five minutes, and the next invocation may take a week.
function call(method, route, body, headers = {}) {
  return new Promise((resolve, reject) => {
    const options = { agent, host, port, method, path: `/2018-06-01/runtime/${route}`, headers };
    const request = http.request(options, (response) => {
      const pieces = [];
      response.on("data", (piece) => pieces.push(piece));
      response.on("end", () => resolve({ headers: response.headers, text: Buffer.concat(pieces).toString() }));
      response.on("error", reject);
    });
    request.on("error", reject);
    request.end(body);
  });
}

function told(error) {
  const stackTrace = String(error?.stack ?? "").split("\n").slice(1);
  return JSON.stringify({ errorType: error?.name ?? "Error", errorMessage: String(error?.message ?? error), stackTrace });
}

function context(headers) {
  const endsAt = Number(headers["lambda-runtime-deadline-ms"]);
  return {
    awsRequestId: headers["lambda-runtime-aws-request-id"],
    invokedFunctionArn: headers["lambda-runtime-invoked-function-arn"],
    functionName: process.env.AWS_LAMBDA_FUNCTION_NAME,
    functionVersion: process.env.AWS_LAMBDA_FUNCTION_VERSION,
    memoryLimitInMB: "0",
    logGroupName: "/perdure/worker",
    logStreamName: String(process.pid),
    callbackWaitsForEmptyEventLoop: false,
    getRemainingTimeInMillis: () => Math.max(0, endsAt - Date.now()),
  };
}

async function load(place) {
  const [, file, name] = /^(.*):([^:]+)$/.exec(place) ?? [];
  if (file === undefined) throw new Error(`${place} is not FILE:EXPORT`);
  const module = await import(pathToFileURL(path.resolve(file)).href);
  const handler = module[name] ?? module.default?.[name];
  if (typeof handler !== "function") throw new Error(`${file} exports no function ${name}`);
  return handler;
}

let handler;
try {
  handler = await load(process.argv[2] ?? "");
} catch (error) {
  console.error(error);
  await call("POST", "init/error", told(error));
  process.exit(1);
}
for (;;) {
  const { headers, text } = await call("GET", "invocation/next");
  const id = headers["lambda-runtime-aws-request-id"];
  try {
    const result = await handler(JSON.parse(text), context(headers));
    await call("POST", `invocation/${id}/response`, JSON.stringify(result) ?? "null");
  } catch (error) {
    console.error(error);
    await call("POST", `invocation/${id}/error`, told(error));
  }
}
